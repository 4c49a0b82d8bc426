"""`verifiers:TASKSET`: tasksets of the library `verifiers`, whose own loop runs the rollouts and
requests each completion.
"""
