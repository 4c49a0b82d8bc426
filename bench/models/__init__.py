"""Benchmarks of pretrained language models: time and memory of a step, TRL's step, and learning."""
