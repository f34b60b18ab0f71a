"""One server process: its loop, its tenants, and a handler for each request."""
