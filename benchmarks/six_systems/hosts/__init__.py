"""Several hosts: clients and servers on each, which take every step at once."""
