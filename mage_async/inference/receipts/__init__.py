"""Receipts of weights: what proves that an engine draws with what the learner published."""
