"""Shared code of benchmarks: baselines, command lines, studies over seeds, and processes of a
run."""
