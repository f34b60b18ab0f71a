"""A fleet: what do several servers find, and how evenly do they fill?"""
