"""Benchmarks: each one a module that is run with `python -m`; README.md says what each asks."""
