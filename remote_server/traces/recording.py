"""kvferry's own format: what a server was asked for, recorded by it.

    {"kvferry_trace": 1, …}
    {"timestamp": 12, "type": "lookup", "namespace": 0, "block_size": 16, "block_bytes": 262144,
     "input_length": 64, "output_length": 0, "hash_ids": [0, 1, 2, 3], "found": 2}
    {"timestamp": 40, "type": "put", …}
    {"end": true, "requests": 1, "lost": 0}

JSON lines. The first has the number of the format, the last the number of requests and of those
that the recording has lost. `timestamp` is in ms. A `put` brings blocks that no lookup asked for,
such as those of an answer. `namespace` is a number; blocks of different namespaces are different.
`block_size` is in tokens. A lookup names what the levels above the server lack, so it may begin in
the middle of its prompt. `found` is the number of blocks that the server had. Other fields are
ignored.
"""

from pathlib import Path

import msgspec

from remote_server.traces.collector import Collector
from remote_server.traces.json_lines import decode, fields_of
from remote_server.traces.text import Lines
from remote_server.traces.trace import Request, Trace, TraceError

NAME = "kvferry"
VERSION = 1
FIRST_FIELD = "kvferry_trace"

CUT = "the line is cut: the recording did not end in order"
NO_END = "the recording has no last line: it did not end in order"
INSIDE = "hash_ids begin in the middle of the prompt"


class _Line(msgspec.Struct):
    timestamp: float
    type: str
    namespace: int
    block_size: int
    block_bytes: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    found: int = 0


class _End(msgspec.Struct):
    end: bool
    requests: int
    lost: int = 0


def read(path: Path, lines: Lines, limit: int | None) -> Trace:
    """The first `limit` requests; see `reader.read`. Recordings have full blocks only."""
    made = Collector(path, NAME, starts_anywhere=True)
    _check_first(path, next(lines))
    made.recorded_found = 0
    kind: tuple[int, int] | None = None
    end: _End | None = None
    ids: dict[tuple[int, int], int] = {}
    number = 1
    for number, line in lines:
        if end is not None:
            raise made.refuse(number, "a line after the last one of the recording")
        if _is_end(line):
            end = _end_of(made, number, line)
            continue
        try:
            one = decode(line, _Line)
        except ValueError as error:
            if not line.endswith("\n"):  # the server was killed while it wrote
                made.problem(number, CUT)
                break
            raise made.refuse(number, f"{error}") from None
        kind = kind or (one.block_size, one.block_bytes)
        _check(made, number, one, kind)
        blocks = tuple(ids.setdefault((one.namespace, each), len(ids)) for each in one.hash_ids)
        is_put = one.type == "put"
        made.add(
            number,
            Request(one.timestamp / 1000, one.input_length, one.output_length, blocks, is_put),
        )
        made.recorded_found += 0 if is_put else one.found
        if len(made) == limit:
            break
    else:
        if end is None:
            made.problem(number, NO_END)
    if kind is None:
        raise TraceError(f"{path}: no requests")
    made.block_bytes = kind[1]
    return made.trace(kind[0])


def _check_first(path: Path, first: tuple[int, str]) -> None:
    number, line = first
    version = (fields_of(line) or {}).get(FIRST_FIELD)
    if version != VERSION:
        raise TraceError(
            f"{path}, line {number:,}: a recording in format {version!r:.20}; this kvferry reads "
            f"format {VERSION}: take the kvferry that recorded it"
        )


def _is_end(line: str) -> bool:
    return '"end"' in line and "end" in (fields_of(line) or {})


def _end_of(made: Collector, number: int, line: str) -> _End:
    try:
        end = decode(line, _End)
    except ValueError as error:
        raise made.refuse(number, f"{error}") from None
    if end.requests != len(made):
        made.problem(
            number, f"the recording counts {end.requests:,} requests, {len(made):,} are there"
        )
    if end.lost:
        made.problem(number, f"{end.lost:,} requests were lost while recording")
    return end


def _check(made: Collector, number: int, one: _Line, kind: tuple[int, int]) -> None:
    """Raises `TraceError`."""
    if one.type not in ("lookup", "put"):
        raise made.refuse(number, f"the type {one.type!r:.40} is neither lookup nor put")
    if one.block_size < 1 or one.block_bytes < 1:
        raise made.refuse(number, "block_size and block_bytes are at least 1")
    if (one.block_size, one.block_bytes) != kind:
        raise made.refuse(
            number,
            f"blocks of {one.block_size} tokens and {one.block_bytes:,} bytes, those before have "
            f"{kind[0]} and {kind[1]:,}: keep the first line and the lines of one namespace and "
            "group",
        )
    num_blocks, num_ids = -(-one.input_length // one.block_size), len(one.hash_ids)
    if num_ids > num_blocks:
        raise made.refuse(
            number,
            f"input_length {one.input_length} is {num_blocks} blocks of {one.block_size} tokens, "
            f"hash_ids has {num_ids}",
        )
    if not 0 <= one.found <= num_ids:
        raise made.refuse(number, f"found {one.found} of {num_ids} blocks")
    if num_ids < one.input_length // one.block_size:
        made.problem(number, INSIDE)
