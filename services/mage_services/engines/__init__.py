"""Engines: who draws the tokens."""
