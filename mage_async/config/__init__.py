"""The configuration of a run: its schema, its files, and what is said of a wrong one."""
