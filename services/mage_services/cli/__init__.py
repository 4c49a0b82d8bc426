"""The `mage` command line: one room for each kind of command, one file a command."""
