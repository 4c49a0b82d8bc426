"""Processes that play trials on an engine: actors, here or on other machines, and the evaluator."""
