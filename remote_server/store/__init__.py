"""The store of a server: namespaces, counters, and the tiers that hold the blocks."""
