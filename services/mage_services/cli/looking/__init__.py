"""Commands that look at what a run left: `mage view`, `report`, `doctor`, `journal`, `track`."""
