"""Text games of other engines: ALFWorld, TextArena, TextWorld (optional extras)."""
