"""Capacity: what does a request cost a server's loop, and how many engines does it carry?"""
