"""Compute returns from rewards (`returns.py`), and lay out the turns of a batch as columns
(`turn_table.py`).
"""
