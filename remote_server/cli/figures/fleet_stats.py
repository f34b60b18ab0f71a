"""`kvferry stats` and `kvferry watch` of a list of servers."""

import argparse
import time
from collections.abc import Iterator

from remote_server.cli.figures.stats_lines import Look, events, print_events
from remote_server.cli.figures.sums import sum_of
from remote_server.cli.servers import connected_to_each
from remote_server.fleet.each import Replies
from remote_server.fleet.server_list import ServerList
from remote_server.protocol import StatsReply
from remote_server.values import format_bytes

_TIERS = ("memory", "disk")
_TITLES = ("server", "ready", "up", "blocks")


def look_at(servers: ServerList, replies: Replies[StatsReply]) -> Look:
    """What these replies show: a table of servers, and their sum."""
    total = sum_of(replies.received)
    sums = {"tiers": total.tiers, "namespaces": total.namespaces, "counters": total.counters}
    shown = {"servers": replies.received, "failed": replies.failed, "sum": sums}
    return Look(total, shown, [*table(servers, replies, total), ""], replies.failed)


def table(servers: ServerList, replies: Replies[StatsReply], total: StatsReply) -> list[str]:
    """A line for each server, and one for all. Columns are as wide as their longest text."""
    tiers = [tier for tier in _TIERS if tier in total.tiers]
    titles = [*_TITLES, *(text for tier in tiers for text in (tier, "")), "found"]
    rows = [titles]
    for member in servers.members:
        reply = replies.received.get(member.name)
        if reply is None:
            rows.append([member.name, "no", *[""] * (len(titles) - 2)])
        else:
            rows.append([member.name, "yes", _age(reply.uptime_s), *_figures(reply, tiers)])
    ready = f"{len(replies.received)} of {len(servers.members)}"
    rows.append(["all", ready, "", *_figures(total, tiers)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [_line(row, widths) for row in rows]


def _line(row: list[str], widths: list[int]) -> str:
    name, ready, *figures = (
        text.ljust(width) if number < 2 else text.rjust(width)
        for number, (text, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join((name, ready, *figures)).rstrip()


def _figures(reply: StatsReply, tiers: list[str]) -> Iterator[str]:
    yield f"{sum(reply.tiers[tier].blocks for tier in tiers if tier in reply.tiers):,}"
    for tier in tiers:
        stats = reply.tiers.get(tier)
        yield format_bytes(stats.used_bytes) if stats else ""
        yield _percent(stats.used_bytes, stats.budget_bytes) if stats else ""
    yield _percent(reply.counters.get("lookup_hits", 0), reply.counters.get("lookup_keys", 0))


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _age(seconds: float) -> str:
    """12 d: the largest unit only."""
    for unit, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{int(seconds // unit)} {name}"
    return f"{int(seconds)} s"


def run_watch(servers: ServerList, flags: argparse.Namespace) -> int:
    """Goes on over restarts of servers, and while some or all are gone."""
    before: dict[str, StatsReply] = {}
    gone: dict[str, str] = {}
    with connected_to_each(servers, flags) as (each, replies):
        while True:
            for name in each.names:
                now = replies.received.get(name)
                if now is not None:
                    lines, grown = events(before.get(name), now)
                    if lines:
                        print_events(flags, lines, grown, name)
                    before[name] = now
                    gone.pop(name, None)
                elif name not in gone:
                    gone[name] = replies.failed[name]
                    print_events(flags, [f"the server is gone: {gone[name]}"], {}, name)
                    before.pop(name, None)
            time.sleep(flags.every_s)
            replies = each.stats(flags.timeout_s)
