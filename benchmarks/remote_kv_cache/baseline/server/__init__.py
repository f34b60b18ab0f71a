"""A server: how fast do whole batches go through it, with keys, and through a fleet?"""
