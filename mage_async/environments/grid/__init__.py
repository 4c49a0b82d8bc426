"""A grid whose goal is told: a sparse task, whose trials can be relabelled in hindsight."""
