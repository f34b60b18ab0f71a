"""The benchmarks of the wde remote KV cache document, on this project's server and connector.

The names of the modules, the models and the parameters are that document's, so that its tables can
stand beside ours.
"""
