"""The base of every request of a client: a connection, the session with its server, and channels."""
