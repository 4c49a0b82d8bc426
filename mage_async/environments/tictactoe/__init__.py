"""Tic-tac-toe against a hidden opponent, or against a version of the policy."""
