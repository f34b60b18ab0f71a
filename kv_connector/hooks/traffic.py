"""Prompt tokens by the level that supplied them, for vLLM and for the log."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

from kv_connector.tier.metrics import DECLINED_BLOCKS, MISSED_BLOCKS, PUT_BLOCKS
from kv_connector.vllm.features import CacheHitSource, Sources


def without_what_was_not_sent(sources: Sources, unsent: int) -> Sources:
    """`sources` with `unsent` tokens of the server counted as the engine's. The sum does not
    change: vLLM requires it."""
    counted = dict(sources)
    unspecified = counted.pop(CacheHitSource.EXTERNAL_UNSPECIFIED, 0)
    unsent = min(unspecified, unsent)
    moved = {
        CacheHitSource.EXTERNAL_UNSPECIFIED: unspecified - unsent,
        CacheHitSource.DEVICE: unsent,
    }
    return counted | {source: tokens for source, tokens in moved.items() if tokens}


def tokens_before_windows(scheduler: Any, request_id: str, num_external_tokens: int) -> int:
    """Tokens of a hit for which no group loads anything. `scheduler` is vLLM's scheduler half of
    the connector."""
    groups = scheduler.config.kv_group_configs
    if any(group.sliding_window_size_in_chunks is None for group in groups):
        return 0
    status = scheduler._req_status[request_id]
    reached = start = status.num_locally_computed_tokens
    end, unsent = start + num_external_tokens, 0
    for first, last, _ in sorted(status.load_key_ranges, key=itemgetter(0)):
        unsent += max(0, min(first, end) - reached)
        reached = max(reached, min(last, end))
    return int(unsent + end - reached)


LEVELS = {CacheHitSource.HOST: "pool", CacheHitSource.EXTERNAL_UNSPECIFIED: "server"}
"""The labels of `REUSED_TOKENS`."""

Totals = Mapping[tuple[str, str], int]

LOG_INTERVAL_S = 60.0

# Our names for vLLM's sources of external hits.
_LEVELS = {
    "host": "CPU pool",
    "external_unspecified": "server",
    "p2p": "peer",
    "disk": "disk",
    "device": "before a window",
}


class Traffic:
    """Counts prompt tokens by the level that supplied them, for a periodic log line.

    vLLM may look a request up many times before it admits it; only the last lookup counts.
    """

    def __init__(
        self, interval_s: float = LOG_INTERVAL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._next_line_s = clock() + interval_s
        self._looked_up: dict[str, tuple[int, int]] = {}
        self._external: Counter[str] = Counter()
        self._seen: Counter[tuple[str, str]] = Counter()
        self.prompt_tokens = 0
        """Of all requests up to the last line."""
        self.reused: Counter[str] = Counter()
        """Those of them that were not computed, by level."""

    def looked_up(self, request_id: str, prompt_tokens: int, engine_tokens: int) -> None:
        """A request is about to be admitted with `engine_tokens` in the engine's own cache."""
        self._looked_up[request_id] = (prompt_tokens, engine_tokens)

    def admitted(self, external: Mapping[str, int]) -> None:
        """Tokens from below the engine, by vLLM's name for the source."""
        self._external.update(external)

    def line(self, totals: Totals | None) -> str | None:
        """The line for an interval that has ended; None before its end and for an idle one."""
        if self._clock() < self._next_line_s:
            return None
        self._next_line_s = self._clock() + self._interval_s
        looked_up, self._looked_up = self._looked_up, {}
        external, self._external = self._external, Counter()
        grown: Counter[tuple[str, str]] = Counter(totals or {})
        grown.subtract(self._seen)
        self._seen = Counter(totals or {})
        if not looked_up and not any(grown.values()):
            return None
        prompt = sum(tokens for tokens, _ in looked_up.values())
        engine = sum(tokens for _, tokens in looked_up.values())
        levels = {"engine": engine}
        levels |= {_LEVELS.get(source, source): n for source, n in external.items()}
        self.prompt_tokens += prompt
        self.reused.update(levels)
        levels["computed"] = max(0, prompt - sum(levels.values()))
        parts = [f"{len(looked_up)} requests, {prompt} prompt tokens: {_list(levels)}"]
        if totals is not None:
            parts.append(f"put {_list(_by_label(grown, PUT_BLOCKS)) or 'nothing'}")
            parts.append(f"missed {_list(_by_label(grown, MISSED_BLOCKS)) or 'nothing'}")
            declined = _by_label(grown, DECLINED_BLOCKS)
            parts.append(f"declined {_list(declined) or 'nothing'}")
        return "; ".join(parts)


def _by_label(grown: Totals, metric: str) -> dict[str, int]:
    return {label: n for (name, label), n in sorted(grown.items()) if name == metric and n > 0}


def _list(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())
