"""Work of the server's loop between requests."""
