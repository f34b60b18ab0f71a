"""Sentences about what other sizes of a tier would find, for the commands and the page."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import exp, inf, isfinite, log

from remote_server.protocol.statistics import EngineState, FoundAt, WhatIf
from remote_server.values import format_bytes

LEAST = 0.01
"""More is not worth its price when it brings less than this share of the tokens."""

_OFF = 1e-6
"""So far a share may be off by rounding."""

_MOST_BYTES, _MOST_TIMES = 1 << 63, 1e6

LEAST_TOKENS = 100_000
"""Of requests, before anything is concluded from them."""

DAY_S = 86_400.0

REASONS = {
    "never_seen": "never seen before",
    "evicted": "evicted",
    "no_pack": "evicted, in no pack",
    "declined": "put declined",
    "not_stored": "seen, never put",
    "late": "still being written",
    "removed": "cleared or expired",
    "other_namespace": "in another namespace",
    "behind": "behind a missing block",
}
"""Words for the reasons of misses, in the order of the output."""

AGES = {"60": "a minute", "600": "ten minutes", "3600": "an hour", "86400": "a day"}

TIERS = {"memory": "memory", "disk": "disk", "bucket": "room in the bucket"}

PLACES = {"memory": " in memory", "disk": " in memory or on disk"}
"""Where the shares of a tier are found, on servers that have more than one."""


def sound(what_if: WhatIf | None) -> WhatIf | None:
    """`what_if`; None when its lists do not fit each other or have numbers without a meaning, as
    those of a server may be that does not know what it sends."""
    if what_if is None or not what_if.budgets or what_if.over_s < 0.0:
        return None
    times, sizes = what_if.times, [*what_if.budgets.values()]
    fits = (
        times.count(1.0) == times.count(0.5) == 1
        and isfinite(what_if.over_s)
        and 0.0 < times[0] <= times[-1] <= _MOST_TIMES
        and all(less < more for less, more in pairwise(times))
        and 0 < min(sizes) <= max(sizes) < _MOST_BYTES
        and all(
            _is_sound(found, what_if) for found in (what_if.total, *what_if.namespaces.values())
        )
    )
    return what_if if fits else None


def _is_sound(found: FoundAt, what_if: WhatIf) -> bool:
    return (
        all(
            {*curves} == {*what_if.budgets}
            and all(len(shares) == len(what_if.times) for shares in curves.values())
            and all(map(_rises, curves.values()))
            for curves in (found.rule, found.lru)
        )
        and all(0.0 <= share <= 1.0 + _OFF for share in found.missed.values())
        and all(0 <= count <= found.asked for count in found.found.values())
    )


def _rises(shares: Sequence[float]) -> bool:
    return all(-_OFF <= one <= 1.0 + _OFF for one in shares) and all(
        less <= more + _OFF for less, more in pairwise(shares)
    )


def sentences(what_if: WhatIf, tier: str, tokens_per_s: float = 0.0) -> list[str]:
    """What more of `tier` would bring, for a reader who sees nothing else. `tokens_per_s` is how
    fast engines compute prompts; 0: not known."""
    found, room = what_if.total, TIERS.get(tier, tier)
    place = PLACES.get(tier, "") if len(what_if.budgets) > 1 else ""
    if found.asked < LEAST_TOKENS:
        return [f"So far engines looked up {found.asked:,} tokens: too few to conclude from."]
    now = what_if.times.index(1.0)
    shares, size = found.rule[tier], what_if.budgets[tier]
    today = f"{100 * shares[now]:.0f} %"
    enough = enough_bytes(what_if.times, shares, size)
    lines = []
    if enough <= size and shares[-1] - shares[now] < LEAST:
        lines.append(
            f"Of the prompt tokens that engines look up, {today} are found{place} today, and more "
            f"{room} would not change that by 1 %."
        )
    else:
        at = _first_gain(shares, now)
        more = size * (what_if.times[at] - 1.0)
        beyond = (
            f"Beyond {format_bytes(int(enough))} in all, more brings less than 1 %."
            if levels_off(shares)
            else f"Up to {format_bytes(int(size * what_if.times[-1]))} in all, more finds more."
        )
        lines.append(
            f"With {format_bytes(int(more))} more {room}, {100 * shares[at]:.0f} % of the prompt "
            f"tokens that engines look up would be found{place}; today {today} are. {beyond}"
        )
        saved = _saved_s(what_if, shares[at] - shares[now], tokens_per_s)
        if saved:
            lines.append(
                f"That saves {_hours(saved)} of computing a day, at the {tokens_per_s:,.0f} tokens "
                "a second that engines compute."
            )
    half = what_if.times.index(0.5)
    lines.append(f"Half of today's {room} would find {100 * shares[half]:.0f} %.")
    if what_if.seen_bytes < size * what_if.times[-1] * 0.9:
        lines.append(
            f"The requests so far were for {format_bytes(what_if.seen_bytes)} of different blocks: "
            "a longer time may show that more is of use."
        )
    return lines


def enough_bytes(times: Sequence[float], shares: Sequence[float], size: float) -> float:
    """The size from which on more brings less than `LEAST`, between the known ones by logarithm."""
    goal = shares[-1] - LEAST
    if shares[0] >= goal:
        return size * times[0]
    at = next(number for number, share in enumerate(shares) if share >= goal)
    low, high = shares[at - 1], shares[at]
    part = (goal - low) / (high - low)
    return size * exp(log(times[at - 1]) + part * (log(times[at]) - log(times[at - 1])))


def levels_off(shares: Sequence[float]) -> bool:
    """Whether the largest size brings less than `LEAST` more than the one before it."""
    return shares[-1] - shares[-2] < LEAST


def found_share(found: FoundAt) -> float:
    """The share of the asked tokens that some tier had."""
    return max(found.found.values(), default=0) / max(found.asked, 1)


def speed_of(engines: Iterable[EngineState]) -> float:
    """How fast engines compute prompts, in the mean of those that have measured it; 0: none."""
    speeds = [one.tokens_per_s for one in engines if 0.0 < one.tokens_per_s < inf]
    return sum(speeds) / len(speeds) if speeds else 0.0


def reasons(found: FoundAt) -> dict[str, float]:
    """Shares of the asked tokens by why they were not found, in the order of `REASONS`; all
    evictions are one."""
    by_reason = dict.fromkeys(REASONS, 0.0)
    for reason, share in found.missed.items():
        known = "evicted" if reason.startswith("evicted") else reason
        by_reason[known] = by_reason.get(known, 0.0) + share
    return {reason: share for reason, share in by_reason.items() if share > 0.0}


def reason_words(found: FoundAt) -> list[tuple[float, str]]:
    """The share of each reason and its words. The shares and the found one are 1."""
    return [
        (share, REASONS.get(reason, reason) + (_ages(found.missed) if reason == "evicted" else ""))
        for reason, share in reasons(found).items()
    ]


def reason_lines(found: FoundAt) -> list[str]:
    """One line for each reason, the shares of which and the found one are 100 %."""
    return [f"{100 * share:5.1f} %  {words}" for share, words in reason_words(found)]


def _ages(missed: Mapping[str, float]) -> str:
    """How long before the request the evictions were, as sums from the shortest on."""
    parts, total = [], 0.0
    for seconds, words in AGES.items():
        share = missed.get(f"evicted_{seconds}", 0.0)
        total += share
        if share:
            parts.append(f"{100 * total:.1f} % less than {words} before")
    return f": {', '.join(parts)}" if parts else ""


def _first_gain(shares: Sequence[float], now: int) -> int:
    """The least larger size that brings half of what the largest one does."""
    goal = shares[now] + (shares[-1] - shares[now]) / 2
    return next(at for at in range(now + 1, len(shares)) if shares[at] >= goal)


def _saved_s(what_if: WhatIf, gain: float, tokens_per_s: float) -> float:
    """A day; 0: not known."""
    if not tokens_per_s or what_if.over_s <= 0.0:
        return 0.0
    saved = what_if.total.asked / what_if.over_s * DAY_S * gain / tokens_per_s
    return saved if isfinite(saved) else 0.0


def _hours(seconds: float) -> str:
    if seconds < 120.0:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200.0 else f"{seconds / 3600:.1f} h"
