"""Admin HTTP of a running server, on a thread and a port of its own."""
