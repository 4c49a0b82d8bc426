"""The configuration of a run: its schema, its files, and the sentences about what is wrong in one."""
