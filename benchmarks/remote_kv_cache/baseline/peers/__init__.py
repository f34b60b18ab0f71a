"""Peers: how fast is the same work on Redis and on memcached?"""
