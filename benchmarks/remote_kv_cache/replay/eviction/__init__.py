"""Eviction in one level: which rule finds most?"""
