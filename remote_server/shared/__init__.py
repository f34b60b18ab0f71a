"""Clients on this host: blocks copied between two memories instead of sent over a socket."""
