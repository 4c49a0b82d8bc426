"""Implement the shipped games, one file each: rules, episodes, scripted players, known values."""
