"""Traces of requests, as the Mooncake paper published them: one JSON object a line.

    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}

`timestamp` is in ms from the start, the lengths are in tokens, and there is an id for each 512
tokens of the prompt; the last block may be shorter. Equal ids mean equal prompts from the first
token to the end of that block, so the blocks of a trace form a tree, and a prompt is a path in it.
"""

import gzip
import io
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

log = logging.getLogger(__name__)

TOKENS_PER_BLOCK = 512

_GZIP_MAGIC = b"\x1f\x8b"


class TraceError(ValueError):
    """A file that is not a trace. The message names it, the line and the defect."""


class Request(NamedTuple):
    """One prompt that arrived."""

    arrival_s: float
    """Seconds since the trace began."""

    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """Ids of the prompt's blocks, from its first token on."""


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read(
    path: Path, *, partial_blocks: bool = False, limit: int | None = None
) -> tuple[Request, ...]:
    """The requests of the trace at `path`, plain or gzipped, or the first `limit` of them.

    An engine caches only full blocks, so a partial last block is omitted; `partial_blocks` keeps
    it. Lines that are earlier than one before them are put in order, counted and logged. Raises
    `TraceError`, also when ids contradict each other: equal ids must follow equal ids.
    """
    requests: list[Request] = []
    late: list[int] = []  # the numbers of the lines that are out of order
    try:
        with _text_of(path) as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and len(requests) >= limit:
                    break
                if line.strip():
                    one = _request(line, partial_blocks, f"{path}, line {number}")
                    if requests and one.arrival_s < requests[-1].arrival_s:
                        late.append(number)
                    requests.append(one)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error  # without the path once more
        raise TraceError(f"{path}: {reason}") from None
    if not requests:
        raise TraceError(f"{path}: no requests")
    try:
        check_tree(requests)
    except ValueError as error:
        raise TraceError(f"{path}: {error}") from None
    if late:
        log.warning(
            "%s: %s lines are earlier than the line before, the first is line %d: sorted by time",
            path, f"{len(late):,}", late[0],
        )  # fmt: skip
    return tuple(sorted(requests, key=lambda request: request.arrival_s))


def check_tree(requests: Iterable[Request]) -> None:
    """Raise `ValueError` when a block has two different predecessors, or comes twice in a prompt:
    then its id does not mean an equal prefix, and hit rates have no meaning."""
    parent_of: dict[int, int | None] = {}
    for request in requests:
        parent: int | None = None
        for block in request.blocks:
            if parent_of.setdefault(block, parent) != parent:
                raise ValueError(f"block {block} follows {parent_of[block]} and also {parent}")
            parent = block


def longest(requests: Sequence[Request]) -> int:
    """Blocks of the longest prompt."""
    return max(len(request.blocks) for request in requests)


def distinct(requests: Iterable[Request]) -> int:
    """Different blocks: the final size of an unlimited cache."""
    return len({block for request in requests for block in request.blocks})


def _request(line: str, partial_blocks: bool, where: str) -> Request:
    try:
        fields = msgspec.json.decode(line, type=_Line)
    except msgspec.MsgspecError as error:
        raise TraceError(f"{where}: {error}") from None
    expected = -(-fields.input_length // TOKENS_PER_BLOCK)
    if len(fields.hash_ids) != expected:
        raise TraceError(
            f"{where}: input_length {fields.input_length} is {expected} blocks of "
            f"{TOKENS_PER_BLOCK} tokens, hash_ids has {len(fields.hash_ids)}"
        )
    full = expected if partial_blocks else fields.input_length // TOKENS_PER_BLOCK
    return Request(
        fields.timestamp / 1000, fields.input_length, fields.output_length, fields.hash_ids[:full]
    )


@contextmanager
def _text_of(path: Path) -> Iterator[Iterator[str]]:
    with path.open("rb") as file:
        packed = file.read(2) == _GZIP_MAGIC
        file.seek(0)
        plain = gzip.GzipFile(fileobj=file) if packed else file
        yield iter(io.TextIOWrapper(plain, "utf-8-sig"))  # some editors write a BOM
