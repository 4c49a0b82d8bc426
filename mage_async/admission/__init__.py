"""Which groups are in flight and which of them a step trains on: the ledger, its rules, staleness."""
