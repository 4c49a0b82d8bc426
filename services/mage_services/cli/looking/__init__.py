"""Commands that look at what a run left: `mage report`, `journal`."""
