"""Blackjack with a stacked deck: the same cards come in every episode."""
