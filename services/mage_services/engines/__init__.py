"""Engines, which sample completions; the README of this folder has the rules for all of them."""
