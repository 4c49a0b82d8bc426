"""What a run will need, before anything is loaded: memory by part, operations, whether it fits."""
