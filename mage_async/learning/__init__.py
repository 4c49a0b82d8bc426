"""Compute the learner's steps: advantages, packing, loss, optimizer."""
