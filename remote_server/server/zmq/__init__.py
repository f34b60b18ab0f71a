"""Puts and gets whose blocks are frames of ZeroMQ messages."""
