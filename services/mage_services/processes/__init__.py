"""Processes of a run: how they are started, supervised, restarted and ended."""
