"""The load of a sweep: conversations of real clients on real servers."""
