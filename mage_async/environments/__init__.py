"""Define the environments in which agents act: `environment.py` has the protocol that all follow,
`catalogue.py` loads one by its name, `games/` has the shipped ones, `loaders/` those of libraries.
"""
