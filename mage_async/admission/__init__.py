"""Decide which groups are granted and trained, and how stale they may become."""
