"""Engines, which draw the tokens; the README of this folder compares them."""
