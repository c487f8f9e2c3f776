"""The results of a run: its costs, its timeline, its outcome in words, and a check of its numbers."""
