"""Reports of a server to others: its identity, its state, its events, its recordings."""
