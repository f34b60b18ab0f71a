"""What runs kvferry on one machine: a model, an engine, a server, and what to do with them."""
