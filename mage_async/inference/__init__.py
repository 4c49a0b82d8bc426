"""Implement the embedded engine: batched decoding with a prefix cache."""
