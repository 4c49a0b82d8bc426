"""Offer the Python interface: `import mage_async as mage` has every public name of this package.

`docs/python.md` shows it. The command line is a thin layer over the same functions.
"""
