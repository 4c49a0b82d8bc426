"""Runs on a Ray cluster: placing processes on nodes, bringing them files, examining nodes."""
