"""The `mage` command line, one file a command."""
