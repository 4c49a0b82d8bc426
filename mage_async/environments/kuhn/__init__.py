"""Kuhn poker against a hidden opponent, or against a version of the policy."""
