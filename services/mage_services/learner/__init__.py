"""The learner process: coordinator, training loop, trainer thread, run log, ranks."""
