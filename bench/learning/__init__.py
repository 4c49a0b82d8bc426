"""Benchmarks of learning: returns of whole runs and of short studies, compared with controls."""
