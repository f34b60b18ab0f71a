"""How fast blocks can move at all: in memory, over sockets, and through a server.

The modules named `test_…` are benchmarks with the names that the source document gave them. pytest
does not collect them; their tests are in `tests/benchmarks/`.
"""
