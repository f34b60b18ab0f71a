"""Lines of `kvferry stats` and `kvferry watch`: contents, counts, and their changes."""

import argparse
import time
from collections.abc import Mapping
from typing import NamedTuple

from remote_server.cli.figures.bucket_lines import bucket_lines
from remote_server.cli.figures.changes import flows, grown
from remote_server.cli.figures.eviction_lines import eviction_lines
from remote_server.cli.figures.what_if_lines import miss_lines
from remote_server.cli.output import duration, print_lines
from remote_server.protocol import StatsReply
from remote_server.protocol.codec import ascii_json
from remote_server.values import format_bytes

# Hits of lookups and gets: the first figures to look at.
RATIOS = (("lookups", "lookup_hits", "lookup_keys"), ("gets", "get_hit", "get_total"))


class Look(NamedTuple):
    """The statistics of a server, or of a list, at one moment."""

    total: StatsReply
    """Those of all servers, as those of one."""

    json: object
    head: list[str]
    """The lines above those of `total`."""

    failed: Mapping[str, str]
    """The servers that did not answer, each with the reason."""


def head(reply: StatsReply) -> str:
    """The line of a server."""
    name = f"{reply.name}  " if reply.name else ""
    mover = f"  mover {reply.mover}" if reply.mover else ""
    lanes = f"  lanes {reply.lanes}" if reply.lanes else ""
    return f"{name}{reply.server}  epoch {reply.epoch}  up {duration(reply.uptime_s)}{mover}{lanes}"


def contents(reply: StatsReply, before: StatsReply | None = None) -> list[str]:
    """The lines below it. With an earlier reply `before`, flows are per second since then."""
    lines = [f"{'tier':<8}  {'used':>10}  {'of':>10}  {'blocks':>10}  {'writing':>8}  pinned"]
    for name, tier in reply.tiers.items():
        kept = f" ({tier.kept:,} kept)" if tier.kept else ""
        lines.append(
            f"{name:<8}  {format_bytes(tier.used_bytes):>10}  {_budget(tier.budget_bytes):>10}"
            f"  {tier.blocks:>10,}  {tier.pending:>8,}  {tier.pinned:>6,}{kept}"
        )
    lines += ["", *_namespaces(reply), ""]
    counters = reply.counters
    for name, hits, total in RATIOS:
        if counters.get(total):
            share = 100 * counters[hits] / counters[total]
            lines.append(f"{name:<10} {counters[total]:>14,} blocks, {share:.1f} % found")
    for name, moved, rate in flows(reply, before):
        if moved:
            text = f"{format_bytes(moved)}, {rate}" if rate else format_bytes(moved)
            lines.append(f"{name:<11} {text:>13}")
    lines += miss_lines(reply)
    lines += eviction_lines(reply)
    lines += bucket_lines(reply, before)
    lines += [f"{name:<28} {count:>12,}" for name, count in _wrong(counters).items()]
    return lines


def _budget(num_bytes: int) -> str:
    """A bucket may have none."""
    return format_bytes(num_bytes) if num_bytes else "no limit"


def _namespaces(reply: StatsReply) -> list[str]:
    if not reply.namespaces:
        return ["no namespace declared yet"]
    width = max(len("namespace"), *map(len, reply.namespaces))
    titles = "".join(f"  {name:>10}" for name in reply.tiers)
    lines = [f"{'namespace':<{width}}  {'block':>10}  {'blocks':>10}{titles}"]
    for name, one in sorted(reply.namespaces.items()):
        used = "".join(f"  {format_bytes(one.share(tier).used_bytes):>10}" for tier in reply.tiers)
        blocks = one.share("memory").blocks
        lines.append(f"{name:<{width}}  {format_bytes(one.block_bytes):>10}  {blocks:>10,}{used}")
    return lines


def _wrong(counters: Mapping[str, int]) -> dict[str, int]:
    """Counters of declined, refused or damaged blocks that are not zero."""
    words = ("declined", "refused", "bad_", "integrity", "damaged", "error", "failed", "evicted")
    return {
        name: count
        for name, count in sorted(counters.items())
        if count and any(word in name for word in words)
    }


def events(before: StatsReply | None, now: StatsReply) -> tuple[list[str], dict[str, int]]:
    """The events between two replies, and the counters that grew."""
    if before is None:
        blocks = sum(tier.blocks for tier in now.tiers.values())
        return [f"{now.server}, epoch {now.epoch}: {blocks:,} blocks"], {}
    if before.epoch != now.epoch:
        return [f"the server was restarted, epoch {now.epoch}"], {}
    lines = [f"+ namespace {name}" for name in now.namespaces if name not in before.namespaces]
    lines += [f"- namespace {name}" for name in before.namespaces if name not in now.namespaces]
    changed = {name: by for name, by in grown(now, before).items() if by}
    lines += [
        f"{name} {format_bytes(by) if 'bytes' in name else format(by, ',')}"
        for name, by in changed.items()
    ]
    return lines, changed


def print_events(
    flags: argparse.Namespace, lines: list[str], grown: Mapping[str, int], name: str = ""
) -> None:
    """One line, now. `name` is that of the server, of several."""
    at, server = time.strftime("%H:%M:%S"), {"server": name} if name else {}
    if flags.json:
        event = {"at": time.time(), **server, "events": lines, "counters": dict(grown)}
        print_lines(ascii_json(event))
    else:
        print_lines(f"{at}  {name and f'{name}: '}{'; '.join(lines)}")
