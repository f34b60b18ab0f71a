"""Replays of a trace of real requests against cache levels, with bounds on the hit rate."""
