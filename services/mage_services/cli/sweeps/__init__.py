"""Matrices of runs: `mage sweep` and `mage ablate` start them side by side and write one page."""
