"""Programs for an interpreter that has verifiers and may lack `mage_async`."""
