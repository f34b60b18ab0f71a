"""Memory of a GPU above a store."""
