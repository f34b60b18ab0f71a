"""The base of every request: a connection, the session with its server, and channels."""
