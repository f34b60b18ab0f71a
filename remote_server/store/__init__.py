"""What the server remembers: namespaces, counters, and the tiers that keep the blocks."""
