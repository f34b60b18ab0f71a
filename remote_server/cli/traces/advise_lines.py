"""Lines of `kvferry advise` for people."""

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from remote_server.cli.output import duration, width
from remote_server.traces.advice import BUCKET_DAYS, ENOUGH, Advice, Given, Way
from remote_server.traces.prices import GB
from remote_server.traces.trace import Trace
from remote_server.values import format_bytes

_WIDEST = 100
"""Columns of a sentence."""


def lines_of(path: Path, trace: Trace, given: Given, advice: Advice) -> Iterator[str]:
    """All that is printed."""
    yield from _wrapped(
        f"{path.name}: {trace.format}, {advice.prompts:,} prompts in {duration(advice.seconds)}, "
        f"{advice.prompt_tokens:,} tokens in whole blocks."
    )
    for problem in trace.problems:
        yield from _indented(f"note: {problem}")
    if trace.recorded_found is not None:
        asked = sum(len(one.blocks) for one in trace.requests if not one.is_put)
        share = trace.recorded_found / asked if asked else 0.0
        yield f"The server that recorded it found {_percent(share)}."
    yield from _wrapped(
        f"Their KV cache is {format_bytes(advice.all_bytes)}, {given.kv_bytes:,} bytes a token. "
        f"With room for all of it {_percent(advice.can_be_found)} of the tokens are found."
    )
    yield ""
    yield from _rooms(given, advice)
    yield ""
    if advice.why_none:
        yield from _wrapped(f"No cache: {advice.why_none}.")
    else:
        yield from _wrapped(
            f"Ways to hold {format_bytes(advice.advised.num_bytes)}, or half of it above a bucket; "
            "memory and disk are of each server:"
        )
        yield from _ways(advice.ways)
    yield ""
    if advice.best is not None:
        hosts = "" if advice.best.servers == 1 else f", on each of {advice.best.servers} hosts"
        yield f"Start with the cheapest that finds as much{hosts}:"
        yield f"  {advice.best.serve(given.disk_writes)}"
        yield ""
    yield from _assumed(trace, given, advice)


def _rooms(given: Given, advice: Advice) -> Iterator[str]:
    rooms = sorted({*advice.rooms, advice.advised}, key=lambda room: room.num_bytes)
    rows = [["room", "found", "first token", "memory", "disk", ""],
            ["", "", "earlier by", "$/month", "$/month", ""]]  # fmt: skip
    for room in rooms:
        gib = room.num_bytes / (1 << 30)
        mark = ""
        if room is advice.advised or room.num_bytes == advice.advised.num_bytes:
            mark = f"<- more brings under {100 * ENOUGH:.0f} %"
        rows.append([
            format_bytes(room.num_bytes), _percent(room.share), f"{room.saved_s:.2f} s",
            _dollars(gib * given.memory_price),
            _dollars(room.num_bytes / GB * given.disk_price), mark,
        ])  # fmt: skip
    yield from _aligned(rows)


def _ways(ways: Sequence[Way]) -> Iterator[str]:
    rows = [["", "hosts", "memory", "disk", "found", "in memory", "below", "$/month"]]
    for way in ways:
        rows.append([
            way.name, f"{way.servers}", format_bytes(way.memory),
            format_bytes(way.disk) if way.disk else "-", _percent(way.share),
            _percent(way.share - way.below), _percent(way.below) if way.below else "-",
            _dollars(way.dollars),
        ])  # fmt: skip
    yield from _aligned(rows)
    for way in ways:
        if way.disk:
            yield f"  Each disk is written {format_bytes(way.disk_writes)} a second."
        if way.bill is not None:
            yield from _indented(
                f"The bucket: {way.bucket_requests:,.0f} requests a month, "
                f"{_dollars(way.bill.requests)} $, and {_dollars(way.bill.storage)} $ for the "
                f"{BUCKET_DAYS} days that it keeps packs."
            )


def _assumed(trace: Trace, given: Given, advice: Advice) -> Iterator[str]:
    prices = given.bucket_prices
    yield "Assumed:"
    for text in (
        f"an engine computes {given.prefill_tokens:,.0f} prompt tokens a second: a first token "
        f"takes {advice.computed_s:.2f} s without a cache",
        f"a server has {format_bytes(given.server_memory)} of memory, a link of "
        f"{given.link_bytes / GB:g} GB/s, and a disk that reads as fast and may be written "
        f"{format_bytes(given.disk_writes)} a second; the busiest minute moves "
        f"{format_bytes(round(advice.busiest_bytes))} a second",
        f"a month costs {given.memory_price:g} $ a GiB of memory and {given.disk_price:g} $ a GB "
        f"of disk; a bucket costs {prices.storage:g} $ a GB, {prices.put:g} $ for 1,000 PUTs and "
        f"{prices.get:g} $ for 1,000 GETs",
        f"a month is like these {duration(advice.seconds)}, and servers share their room",
        *trace.assumptions,
    ):
        yield from _indented(text)
    if advice.block_tokens != trace.block_tokens:
        yield from _indented(f"found tokens are counted in blocks of {advice.block_tokens}")


def _wrapped(text: str, indent: str = "", hanging: str = "") -> list[str]:
    return textwrap.wrap(
        text, min(width(), _WIDEST), initial_indent=indent, subsequent_indent=hanging,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _indented(text: str) -> list[str]:
    return _wrapped(text, "  ", "    ")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _dollars(dollars: float) -> str:
    return f"{dollars:,.0f}" if dollars >= 10 else f"{dollars:.2f}"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The first column to the left, numbers to the right, a remark at the end to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if not place or cell.startswith("<-") else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield ("  " + "  ".join(cells)).rstrip()
