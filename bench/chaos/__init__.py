"""Benchmarks under harm: killed processes, hostile peers, damaged inputs, a learner that stalls."""
