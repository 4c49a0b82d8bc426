"""Runs on the nodes of a Ray cluster: placed, started, kept, provided with files, and examined."""
