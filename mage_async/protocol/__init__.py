"""The bytes that leave a process: messages, trial frames, journal records."""
