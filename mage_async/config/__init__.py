"""Define the configuration of a run: its schema, its files, and the errors of a wrong one."""
