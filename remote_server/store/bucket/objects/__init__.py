"""The client of the object store, its process, and the memory of its calls."""
