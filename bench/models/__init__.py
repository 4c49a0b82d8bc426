"""Benchmarks of pretrained language models: what a step takes, and whether one learns to adapt."""
