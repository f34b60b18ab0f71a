"""The remote tier: lookups and transfers between the pool and the servers."""
