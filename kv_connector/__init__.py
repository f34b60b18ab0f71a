"""kvferry's vLLM side: the connector, its spec and workers, and the remote tier."""

__version__ = "0.1.0"

# The vLLM release lines that the test suite runs against.
TESTED_VLLM = ("0.32",)
