"""Eviction that learns which prompts come back, with LRU as its floor."""
