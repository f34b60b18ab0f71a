"""Peers: the systems that ours is compared with, each by its own software."""
