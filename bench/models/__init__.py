"""Benchmarks of pretrained language models: a step, the same beside TRL, and what one learns."""
