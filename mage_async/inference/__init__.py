"""The embedded engine: batched decoding with a prefix cache."""
