"""Write the journal to disk, read it back, and export its trials."""
