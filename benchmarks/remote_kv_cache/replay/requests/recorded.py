"""The requests of a recorded trace, in the blocks that the benchmarks model."""

import logging
from pathlib import Path

from remote_server import traces
from remote_server.traces import Request, TraceError
from remote_server.traces.mooncake import TOKENS_PER_BLOCK

log = logging.getLogger(__name__)


def read(
    path: Path, *, partial_blocks: bool = False, limit: int | None = None
) -> tuple[Request, ...]:
    """Those of the trace at `path`, or the first `limit` of them, in blocks of `TOKENS_PER_BLOCK`
    tokens. Its problems are logged. Raises `TraceError`."""
    trace = traces.read(path, partial_blocks=partial_blocks, limit=limit)
    for line in (*trace.problems, *trace.assumptions):
        log.warning("%s: %s", path, line)
    if trace.starts_anywhere:
        raise TraceError(f"{path}: a recording of a server has no whole prompts")
    return trace.in_blocks_of(TOKENS_PER_BLOCK).requests
