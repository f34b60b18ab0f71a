"""Lines of `kvferry stats` about misses, and of `--what-if` about other sizes."""

from collections.abc import Collection

from remote_server.cli.output import duration
from remote_server.protocol import StatsReply, WhatIf
from remote_server.protocol.what_if_words import (
    found_share,
    reason_lines,
    sentences,
    sound,
    speed_of,
)
from remote_server.values import format_bytes

MOST_NAMESPACES = 20
"""Those with most tokens; a line each."""


def miss_lines(reply: StatsReply) -> list[str]:
    """Why tokens were not found."""
    what_if = sound(reply.what_if)
    if what_if is None or not what_if.total.asked or not what_if.total.missed:
        return []
    total = what_if.total
    head = f"{'tokens':<10} {total.asked:>14,} looked up in {duration(what_if.over_s)}"
    rows = [f"{100 * found_share(total):5.1f} %  found", *reason_lines(total)]
    given_up = sum(one.given_up for one in reply.engines)
    if given_up:
        rows.append(f"beside these, engines computed {given_up:,} blocks that came too late")
    return [head, *(f"{'':<10} {row}" for row in rows)]


def what_if_lines(reply: StatsReply) -> list[str]:
    """For each tier a table of sizes and its meaning in words."""
    what_if = sound(reply.what_if)
    if what_if is None:
        return ["no server that answered has a curve: it is older than this command"]
    total = what_if.total
    if not total.asked:
        return [f"no engine has looked a prompt up in the last {duration(what_if.over_s)}"]
    lines = [f"{total.asked:,} tokens looked up in the last {duration(what_if.over_s)}"]
    for tier in what_if.budgets:
        lines += ["", *_table(what_if, tier)]
        lines += ["", *sentences(what_if, tier, speed_of(reply.engines))]
    if len(what_if.namespaces) > 1:
        lines += ["", *_by_namespace(what_if)]
    return lines


def why_lines(reply: StatsReply, names: Collection[str]) -> list[str]:
    """Why the tokens of each of these namespaces were not found."""
    what_if = sound(reply.what_if)
    lines: list[str] = []
    for name, one in what_if.namespaces.items() if what_if is not None else ():
        if name in names and one.asked and one.missed:
            share = 100 * found_share(one)
            lines += ["", f"{name}: of {one.asked:,} tokens looked up {share:.1f} % were found"]
            lines += reason_lines(one)
    return lines


def _table(what_if: WhatIf, tier: str) -> list[str]:
    size, total = what_if.budgets[tier], what_if.total
    has_rule = what_if.rule != "lru"
    lines = [f"{tier:<8}  {'size':>10}  {'found':>8}" + f"  {'by LRU':>8}" * has_rule]
    for number, times in enumerate(what_if.times):
        by_lru = f"  {100 * total.lru[tier][number]:6.1f} %" * has_rule
        today = "  today" if times == 1.0 else ""
        lines.append(
            f"{'':<8}  {format_bytes(int(size * times)):>10}"
            f"  {100 * total.rule[tier][number]:6.1f} %{by_lru}{today}"
        )
    return lines


def _by_namespace(what_if: WhatIf) -> list[str]:
    """What each namespace finds today, and in twice and eight times the fastest tier."""
    tier, times = next(iter(what_if.budgets)), what_if.times
    shown = sorted(what_if.namespaces.items(), key=lambda one: one[1].asked, reverse=True)
    width = max(len("namespace"), *(len(name) for name, _ in shown[:MOST_NAMESPACES]))
    columns = [times.index(one) for one in (0.5, 1.0, 2.0, 8.0) if one in times]
    titles = "".join(f"  {'today' if times[at] == 1 else f'{times[at]:g} x':>8}" for at in columns)
    lines = [f"{'namespace':<{width}}  {'tokens':>14}{titles}  of {tier}"]
    for name, one in shown[:MOST_NAMESPACES]:
        cells = "".join(f"  {100 * one.rule[tier][at]:6.1f} %" for at in columns)
        lines.append(f"{name:<{width}}  {one.asked:>14,}{cells}")
    if len(shown) > MOST_NAMESPACES:
        lines.append(f"and {len(shown) - MOST_NAMESPACES:,} more")
    return lines
