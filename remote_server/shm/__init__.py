"""Memory shared by a server and the clients on its host."""
