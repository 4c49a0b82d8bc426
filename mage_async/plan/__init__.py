"""Estimate the needs of a run before anything is loaded: memory by part, operations, whether it
fits.
"""
