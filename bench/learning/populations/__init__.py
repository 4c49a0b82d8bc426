"""Benchmarks of opponents in Kuhn poker: scripts, past policies, or the policy itself."""
