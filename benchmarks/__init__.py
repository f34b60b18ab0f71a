"""Benchmarks, each a module for `python -m`; README.md has the question of each."""
