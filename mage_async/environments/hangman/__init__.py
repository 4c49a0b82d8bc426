"""Hangman: the word stays the same, so its letters are known after an episode."""
