"""Benchmarks of the kernels: time, memory and error of the RL head and of group advantages."""
