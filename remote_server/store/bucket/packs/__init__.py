"""Packs: the rows that form an object of the bucket, its name and its format."""
