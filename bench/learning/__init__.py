"""Benchmarks of learning: what whole runs and short studies earn, beside their controls."""
