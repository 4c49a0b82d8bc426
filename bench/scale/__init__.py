"""Benchmarks of scale: how many actors the learner's real code could serve, in simulated time."""
