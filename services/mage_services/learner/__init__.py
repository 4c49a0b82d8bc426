"""The learner process: inbox, coordinator, trainer thread, run log."""
