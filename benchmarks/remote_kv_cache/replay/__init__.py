"""A trace of real requests, replayed against cache levels: what is found, and what might be."""
