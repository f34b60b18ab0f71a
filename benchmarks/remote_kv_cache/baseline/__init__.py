"""Baselines: the speed of blocks in memory, over sockets, and through a server.

The modules named `test_…` are benchmarks with the source document's names. pytest
does not collect them; their tests are in `tests/benchmarks/`.
"""
