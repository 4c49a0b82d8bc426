"""Boxes: which of two buttons opens each box, the smallest task that takes memory alone."""
