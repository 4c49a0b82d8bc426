"""Benchmarks of failures: killed processes, damaged messages and inputs, broken environments."""
