"""Fixtures of canaries."""

from canary_host import make_host, server

__all__ = ["make_host", "server"]
