"""Choose the task and the opponent of a group: task stream, curriculum, population, matchmaking."""
