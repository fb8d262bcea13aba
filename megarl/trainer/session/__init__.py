"""A run: what joins it, its loops, and how its ranks agree."""
