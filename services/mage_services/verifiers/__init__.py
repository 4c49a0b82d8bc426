"""`verifiers:TASKSET`: the library's own loop runs the rollout and requests each completion."""
