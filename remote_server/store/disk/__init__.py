"""The disk tier: copies of the blocks of memory that survive eviction, a kill and a restart.

docs/disk.md has the format, recovery, losses and the budget.
"""
