"""What a run leaves on disk and what is computed from it: run directory, metrics, scores, summary."""
