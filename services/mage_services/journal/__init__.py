"""The journal on disk: written, read back, exported."""
