"""Recorded requests of an LLM service: their files, and replays against the store's policies.

`read` returns a `Trace` of any format that it knows by its content; each format has a module with
its documentation.
"""

from remote_server.traces.reader import read
from remote_server.traces.trace import (
    Problem,
    Request,
    Trace,
    TraceError,
    check_tree,
    distinct,
    longest,
)

__all__ = [
    "Problem",
    "Request",
    "Trace",
    "TraceError",
    "check_tree",
    "distinct",
    "longest",
    "read",
]
