"""One server process: its loop, its tenants, and what it does for each request."""
