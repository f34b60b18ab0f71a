"""`kvferry`, the command: a module for each subcommand, and what they share.

`commands.py` lists them, `__main__.py` runs them.
"""
