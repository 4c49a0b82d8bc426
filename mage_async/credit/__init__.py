"""Rewards to returns, laid out turn by turn, and what may be asked of advantages."""
