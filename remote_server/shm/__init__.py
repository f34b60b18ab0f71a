"""Memory that a server and the clients on its host share."""
