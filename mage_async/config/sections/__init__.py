"""The tables of a configuration: one struct a table, one docstring a key, a default for every key."""
