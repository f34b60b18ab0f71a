"""Requests of a replay: recorded, or made up with a seed."""
