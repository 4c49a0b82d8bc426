"""The index of a run: built by a process of its own, read by pages."""
