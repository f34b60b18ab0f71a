"""For tools that still look for a setup.py. Everything is declared in pyproject.toml."""

from setuptools import setup

setup()
