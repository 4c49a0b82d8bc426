"""Trackers: W&B, TensorBoard, MLflow and trackio, to each of which its own process sends a run."""
