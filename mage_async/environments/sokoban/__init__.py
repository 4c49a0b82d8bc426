"""Sokoban in rooms that can all be solved."""
