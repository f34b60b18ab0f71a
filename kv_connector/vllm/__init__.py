"""Versions of vLLM, the names that kvferry uses, the engines that it refuses, and vLLM's events."""
