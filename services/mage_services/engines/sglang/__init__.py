"""SGLang as an engine: its process, what is said to that process, and the turns it draws."""
