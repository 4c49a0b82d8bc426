"""Read and write the files of a run, and compute metrics, scores and summaries from them."""
