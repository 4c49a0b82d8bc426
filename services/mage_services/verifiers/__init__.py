"""`verifiers:TASKSET`: its loop owns the rollout, and asks us for each completion."""
