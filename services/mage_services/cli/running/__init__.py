"""Commands that play or train: `mage train`, `evaluate`, `play`, `replay`, `actor`."""
