"""Losses on tokens that older policies drew, one algorithm a file."""
