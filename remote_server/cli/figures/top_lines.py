"""The screen of `kvferry top`: 80 columns, from two replies to `Stats`."""

from collections.abc import Sequence

from remote_server.cli.figures.changes import flows, grown, seconds_since
from remote_server.cli.figures.stats_lines import RATIOS
from remote_server.cli.output import duration
from remote_server.protocol import EngineState, StatsReply
from remote_server.values import format_bytes

WIDTH = 80

_LEVELS = ("engine", "pool", "server")
_TITLES = ("prompt tokens", *_LEVELS, "computed", "given up")


def screen(reply: StatsReply, before: StatsReply | None, most_engines: int = 20) -> list[str]:
    """The lines, none longer than `WIDTH`. Changes are those since `before`, a second since then.

    `before` of another epoch, that is of a server that has been restarted since, counts as none.
    """
    return [
        line[:WIDTH].rstrip()
        for line in (
            _head(reply), "",
            *_found(reply, before), "",
            *_flows(reply, before), "",
            *_tiers(reply, before), "",
            *_engines(reply.engines, most_engines),
        )
    ]  # fmt: skip


def _head(reply: StatsReply) -> str:
    if not reply.server:  # of a list
        return f"{reply.name}, up {duration(reply.uptime_s)} in the mean"
    name = f"{reply.name}  " if reply.name else ""
    return f"{name}{reply.server}  up {duration(reply.uptime_s)}"


def _found(reply: StatsReply, before: StatsReply | None) -> list[str]:
    """Hit rates, now and since the start."""
    rows = [("found", "now", "since the start", "")]
    now = grown(reply, before)
    for name, hits, total in RATIOS:
        share = _percent(now.get(hits, 0), now.get(total, 0))
        whole = _percent(reply.counters.get(hits, 0), reply.counters.get(total, 0))
        rows.append((name, share, whole, f"of {reply.counters.get(total, 0):,} blocks"))
    counters = {f"hits_{tier}": tier for tier in reply.tiers}
    in_all = sum(reply.counters.get(counter, 0) for counter in counters)
    lately = sum(now.get(counter, 0) for counter in counters)
    for counter, tier in counters.items():
        count = reply.counters.get(counter, 0)
        share = _percent(now.get(counter, 0), lately)
        rows.append((f"  from {tier}", share, _percent(count, in_all), f"{count:,} blocks"))
    return [f"{name:<16}{recent:>12}{whole:>18}  {of}".rstrip() for name, recent, whole, of in rows]


def _flows(reply: StatsReply, before: StatsReply | None) -> list[str]:
    lines = [f"{'blocks':<16}{'now':>12}{'since the start':>18}"]
    for name, total, rate in flows(reply, before):
        if total or name in ("in", "out"):
            lines.append(f"{name:<16}{rate or '-':>12}{format_bytes(total):>18}")
    return lines


def _tiers(reply: StatsReply, before: StatsReply | None) -> list[str]:
    now, seconds = grown(reply, before), seconds_since(reply, before)
    lines = [f"{'tier':<10}{'used':>11}{'of':>11}{'full':>9}{'blocks':>12}{'evicted/s':>12}"
             f"{'declined/s':>12}"]  # fmt: skip
    for name, tier in reply.tiers.items():
        prefix = "" if name == "memory" else f"{name}_"
        evicted = now.get(f"{prefix}evicted", 0)
        put = "put_declined_" if name == "memory" else f"{name}_declined_"
        declined = sum(count for counter, count in now.items() if counter.startswith(put))
        budget = format_bytes(tier.budget_bytes) if tier.budget_bytes else "no limit"
        lines.append(
            f"{name:<10}{format_bytes(tier.used_bytes):>11}{budget:>11}"
            f"{_percent(tier.used_bytes, tier.budget_bytes):>9}{tier.blocks:>12,}"
            f"{_rate(evicted, seconds):>12}{_rate(declined, seconds):>12}"
        )
    return lines


def _engines(engines: Sequence[EngineState], most: int) -> list[str]:
    """A line for each, those with most prompt tokens first."""
    if not engines:
        return ["no engine has reported yet; each does about once a minute while it has requests"]
    shown = sorted(engines, key=lambda one: (-one.prompt_tokens, one.client))
    titles = f"{_TITLES[0]:>14}" + "".join(f"{title:>9}" for title in _TITLES[1:])
    lines = [f"{'engine':<20} {titles}"]
    for one in shown[:most]:
        if not one.prompt_tokens:
            lines.append(f"{one.client:<20.20} no figures yet: it sends them about once a minute")
            continue
        reused = [one.reused.get(level, 0) for level in _LEVELS]
        shares = (*reused, max(one.prompt_tokens - sum(reused), 0))
        cells = "".join(f"{_percent(tokens, one.prompt_tokens):>9}" for tokens in shares)
        lines.append(f"{one.client:<20.20} {one.prompt_tokens:>14,}{cells}{one.given_up:>9,}")
    if len(shown) > most:
        lines.append(f"and {len(shown) - most:,} more")
    return lines


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds:,.0f}" if seconds else "-"
