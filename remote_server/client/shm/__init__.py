"""Puts and gets over shared memory, on one host."""
