"""Start, supervise, restart and end the processes of a run."""
