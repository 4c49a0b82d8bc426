"""Rewards to returns, and returns to advantages."""
