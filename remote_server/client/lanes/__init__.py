"""Puts and gets whose blocks travel on lanes: TCP connections beside ZeroMQ."""
