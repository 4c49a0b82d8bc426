"""What several benchmarks share: baselines, studies by seed, and processes of a run."""
