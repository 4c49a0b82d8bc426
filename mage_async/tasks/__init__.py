"""Which task a group plays and against whom: task stream, curriculum, population, matchmaking."""
