"""Matrices of runs: which cells there are, what a finished one says, and means over seeds."""
