"""The stack: memory above a list of tiers, and blocks on their way down and up."""
