"""Serve live pages of runs to browsers on this machine (`mage view`)."""
