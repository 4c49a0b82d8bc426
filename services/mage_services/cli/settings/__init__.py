"""Commands about settings and the command line: `mage config`, `keys`, `completion`."""
