"""MineSweeper whose mines stay where they are from episode to episode."""
