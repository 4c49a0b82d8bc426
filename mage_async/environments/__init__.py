"""Define the environments: `environment.py` holds the protocol, `catalogue.py` finds one by its
name.
"""
