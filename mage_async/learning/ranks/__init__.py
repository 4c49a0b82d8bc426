"""The learner's step on several processes, its ranks: each holds a share of every weight."""
