"""The environments, one a file; `environment.py` holds the protocol, `catalogue.py` finds one by its name."""
