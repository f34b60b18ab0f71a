"""Bare sockets: how fast do blocks pass from process to process without a server?"""
