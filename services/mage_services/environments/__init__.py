"""Calls into environments, made in threads, on an event loop, or in worker processes."""
