"""Benchmarks of the system: throughput, the wire, the journal and whole runs on one machine."""
