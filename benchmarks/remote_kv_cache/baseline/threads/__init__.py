"""Threads: which one spends the time of a transfer?"""
