"""Games of guessing a hidden code: Wordle, Mastermind, and a number lock."""
