"""The load: when does each request begin, and how many users are there?"""
