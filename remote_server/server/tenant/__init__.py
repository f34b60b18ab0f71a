"""A tenant's part of the server."""
