"""Bucket: how near is the tier to bare calls of an object store?"""
