"""Trainable graph memory (arXiv 2511.07800): what earlier tasks taught, told to later trials.

`paths.py` makes paths of finished episodes, `graph.py` holds paths, strategies and trained weights,
`drawing.py` draws strategies, `memory.py` is what a run has of it all, `demonstrations.py` what a
warm start tells of it.
"""
