"""Serve an actor with SGLang: its process, the messages to that process, and the queue of turns."""
