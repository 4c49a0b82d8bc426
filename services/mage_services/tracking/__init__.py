"""Trackers: W&B, TensorBoard, MLflow and trackio, each told a run's metrics by its own process."""
