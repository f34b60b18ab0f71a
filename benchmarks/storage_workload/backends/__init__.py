"""Stores under the load: this process's, a server's, a GPU's, and emulated ones."""
