"""Any two-player game of OpenSpiel, by name."""
