"""What people and their tools ask a running server over HTTP, on a thread and a port of its own."""
