"""Memory: the tier that serves every request."""
