"""The source documents of this project: a module for each, with its figures as `DOCUMENT`.

`harness.registry` finds them, and `python -m benchmarks report` shows each table in the section of
its benchmark. A module here imports nothing heavy: writing the page must not load torch.
"""
