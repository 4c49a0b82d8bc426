"""StepAgent (arXiv 2411.03817): the policy imitates an expert, turn by turn."""
