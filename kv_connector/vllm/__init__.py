"""Differences between the versions of vLLM, the names of vLLM that kvferry uses, and its events."""
