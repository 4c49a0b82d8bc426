"""Call environments in threads, on an event loop, or in worker processes."""
