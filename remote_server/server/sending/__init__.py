"""Outgoing messages, the pins of their blocks, and the queues of connections."""
