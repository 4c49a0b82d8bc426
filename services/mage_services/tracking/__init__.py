"""Send runs to trackers (W&B, TensorBoard, MLflow, trackio), each in a process of its own."""
