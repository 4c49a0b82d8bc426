"""Processes that play trials on an engine: actors and the evaluator."""
