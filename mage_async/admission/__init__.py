"""The ledger of groups in flight: who is granted, what a step trains, how stale it may be."""
