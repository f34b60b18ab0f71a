"""Incoming messages, and the queue of requests."""
