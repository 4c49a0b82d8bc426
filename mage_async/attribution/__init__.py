"""Why was this turn pushed up: returns, advantages and staleness of every turn, from a journal."""
