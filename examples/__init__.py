"""Examples of kvferry on one machine: a model, an engine, a server, and measurements of them."""
