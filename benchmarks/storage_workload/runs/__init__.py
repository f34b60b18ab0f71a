"""Runs: one, several in sequence, and the same one again."""
