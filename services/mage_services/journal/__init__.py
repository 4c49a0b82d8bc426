"""The journal on disk: write it, read it back, export its trials."""
