"""Reading of a trace whose format is known by its content."""

import itertools
from pathlib import Path

from remote_server.traces import azure, bailian, burstgpt, mooncake, recording
from remote_server.traces.collector import NO_PREFIXES
from remote_server.traces.json_lines import fields_of
from remote_server.traces.tables import columns_of
from remote_server.traces.text import Lines, lines_of
from remote_server.traces.trace import Trace, TraceError

KNOWN = "Known are JSON lines of Mooncake, Qwen-Bailian and kvferry, and CSV of BurstGPT"

_POINTER = "version https://git-lfs"


def read(path: Path, *, partial_blocks: bool = False, limit: int | None = None) -> Trace:
    """The trace at `path`, plain or gzipped, or its first `limit` requests.

    An engine caches only full blocks, so a partial last block is omitted; `partial_blocks` keeps it
    where the file has an id for it. Lines that are accepted although something is wrong with them
    are counted in `problems`. Raises `TraceError` for everything else.
    """
    lines = lines_of(path)
    first = next(lines, None)
    if first is None:
        raise TraceError(f"{path}: no requests: the file is empty")
    lines = itertools.chain([first], lines)
    if first[1].startswith(_POINTER):
        raise TraceError(f"{path}: a pointer of Git LFS: fetch the file with `git lfs pull`")
    if first[1].lstrip().startswith("{"):
        return _json(path, first, lines, partial_blocks, limit)
    columns = columns_of(first[1])
    if set(azure.COLUMNS) <= set(columns):
        raise azure.refusal(path)
    if set(burstgpt.COLUMNS) <= set(columns):
        return burstgpt.read(path, lines, limit, columns)
    if missing := _nearly_burst(columns):
        raise TraceError(f"{path}: BurstGPT without the column {missing}")
    raise TraceError(f"{path}, line {first[0]}: no known format: {first[1].strip()!r:.60}. {KNOWN}")


def _json(
    path: Path, first: tuple[int, str], lines: Lines, partial_blocks: bool, limit: int | None
) -> Trace:
    fields = fields_of(first[1]) or {}
    if recording.FIRST_FIELD in fields:
        return recording.read(path, lines, limit)
    if "chat_id" in fields or "parent_chat_id" in fields:
        return bailian.read(path, lines, partial_blocks, limit)
    if fields and not isinstance(fields.get("hash_ids"), list):
        raise TraceError(
            f"{path}, line {first[0]}: no list hash_ids: which prompts begin alike is not in the "
            f"file. {NO_PREFIXES}"
        )
    return mooncake.read(path, lines, partial_blocks, limit)


def _nearly_burst(columns: list[str]) -> str:
    """The missing ones of a file that has others of BurstGPT's columns; "" for any other file."""
    missing = [name for name in burstgpt.COLUMNS if name not in columns]
    is_near = any(name in columns for name in burstgpt.COLUMNS[1:])
    return ", ".join(map(repr, missing)) if is_near else ""
