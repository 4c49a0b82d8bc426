"""Attribution: the return, advantage and staleness of every turn, computed from a journal."""
