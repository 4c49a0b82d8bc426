"""Run the learner process: coordinator, training loop, trainer thread, run log, ranks."""
