"""The ledger of groups in flight: what is granted, what a step trains, how stale it may be."""
