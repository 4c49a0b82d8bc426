"""Who sits in the other seats: scripts, past policies, or the policy itself, in Kuhn poker."""
