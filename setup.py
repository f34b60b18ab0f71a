"""An entry point for tools that need a setup.py. pyproject.toml has all declarations."""

from setuptools import setup

setup()
