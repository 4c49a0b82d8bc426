"""A contextual bandit: which arm pays for which context has to be found out."""
