"""Benchmarks of scale: the learner's real code with up to thousands of actors, in simulated
time."""
