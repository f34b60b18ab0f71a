"""Routers before several engines that share cache servers: rules, a model, and real engines."""
