"""A maze: the walls and the goal stay where they are, so the way is known after an episode."""
