"""The work that all benchmarks here share: blocks of known bytes, clients, and servers."""
