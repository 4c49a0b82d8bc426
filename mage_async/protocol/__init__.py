"""Encode what leaves a process as bytes: messages, trials and journal records."""
