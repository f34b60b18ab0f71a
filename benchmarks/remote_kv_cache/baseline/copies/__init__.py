"""Copies in memory: how fast are those of a host's worker, and of a device?"""
