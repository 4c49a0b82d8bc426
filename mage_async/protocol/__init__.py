"""The bytes that leave a process: messages, trials and journal records."""
