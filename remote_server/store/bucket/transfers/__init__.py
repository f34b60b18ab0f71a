"""Reads and writes of packs that are under way."""
