"""Admission of connections: handshakes, keys of tenants, and the open connections."""
