"""The JSON of `/stats` and `/settings`."""

from collections.abc import Sequence
from typing import Any

import msgspec

from remote_server.server.config import ServerConfig
from remote_server.server.metrics import BOUNDS_S
from remote_server.server.snapshot import Snapshot

MASK = "***"
_SECRET = ("token", "secret", "password", "key")
"""The last words of settings that are secrets. The path of a secret is not one."""


def shown(config: ServerConfig) -> dict[str, Any]:
    """Every setting by its name; `MASK` in place of a secret that is set."""
    return {
        name: MASK if value and name.endswith(_SECRET) else value
        for name, value in msgspec.structs.asdict(config).items()
    }


PERCENTILES = (50, 90, 99)


def summary(snapshot: Snapshot) -> dict[str, Any]:
    """All of `snapshot`, with counts and percentiles of its histograms."""
    content: dict[str, Any] = msgspec.to_builtins(snapshot)
    content["bounds_s"] = list(BOUNDS_S)
    for name, timings in snapshot.operations.items():
        operation = content["operations"][name]
        operation["count"] = sum(timings.counts)
        for percent in PERCENTILES:
            operation[f"p{percent}_s"] = percentile(timings.counts, percent)
    return content


def percentile(counts: Sequence[int], percent: float) -> float | None:
    """The time within which `percent` of the observations lie, interpolated linearly in its bucket;
    None without observations. Above the last bound it is that bound."""
    rank = sum(counts) * percent / 100
    seen = 0
    for number, count in enumerate(counts):
        if count and seen + count >= rank:
            if number == len(BOUNDS_S):
                return BOUNDS_S[-1]
            low = BOUNDS_S[number - 1] if number else 0.0
            return low + (BOUNDS_S[number] - low) * (rank - seen) / count
        seen += count
    return None
