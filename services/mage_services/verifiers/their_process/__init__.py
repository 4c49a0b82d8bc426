"""Programs that run in a Python of the user's that has verifiers; they import nothing of ours."""
