"""Implement the `mage` command line, with one file for each command."""
