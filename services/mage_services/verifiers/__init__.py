"""Play `verifiers:TASKSET`, a set of tasks of the library `verifiers`. The library's own loop runs
the rollouts, and requests each completion from the policy.
"""
