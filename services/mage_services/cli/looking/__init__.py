"""Commands that look at what a run left: `mage report`, `doctor`, `journal`."""
