"""The runs of `mage ablate`: started side by side, read, and written as page, table and picture."""
