"""Engines: who draws the tokens; the README of this folder compares them."""
