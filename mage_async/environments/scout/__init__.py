"""Scout: looking costs a reward now and pays in a later episode."""
