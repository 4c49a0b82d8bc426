"""The tables of a configuration: a struct a table, a default and a docstring a key."""
