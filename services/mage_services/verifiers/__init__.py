"""Play tasksets of the library `verifiers`, whose own loop runs the rollouts and requests each
completion: `verifiers:TASKSET`.
"""
