"""A handler for each type of request."""
