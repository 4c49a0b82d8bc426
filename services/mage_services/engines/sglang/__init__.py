"""SGLang as an engine: its process, the messages to that process, and the turns it draws."""
