"""The files of a run, and the figures computed from them: metrics, scores, summary."""
