"""Read and write the files of a run, and compute figures from them: metrics, scores, summary."""
