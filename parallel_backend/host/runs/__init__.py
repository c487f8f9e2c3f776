"""What became of a run: its costs, its timeline, its outcome in words, and whether its numbers are any."""
