"""The bytes that leave a process: messages, trial frames, file chunks, journal records."""
