"""Where the tokens of a prompt came from: proven by what engine and cache server counted.

An engine with kvferry tells its own cache, the CPU pool and the server apart in `/metrics`; the
server's statistics tell its memory and its disk apart. What nobody counts is not guessed: without
the server's statistics its tokens are `server`, and without the engine's they are `cached`, if
the answer says that.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from examples.endpoint import Endpoint, FirstToken
from examples.engine import tokens_by_level
from remote_server.client import RemoteClient
from remote_server.protocol import StatsReply

COMPUTED, ENGINE, POOL, MEMORY, DISK = (
    "computed", "engine cache", "CPU pool", "server memory", "server disk"
)  # fmt: skip
LEVELS = (COMPUTED, ENGINE, POOL, MEMORY, DISK)
SERVER, CACHED, UNKNOWN = "server", "cached", "unknown"
"""Levels where less is counted: memory or disk; any but computed; any at all."""


@dataclass(frozen=True)
class Counts:
    """What was counted until one moment. None where nobody tells."""

    engine: Mapping[str, int] | None
    got_blocks: int | None  # that the cache server handed out
    from_disk: int | None  # of these, those its memory had not


class TokenSources:
    """The counters of an engine, and of its cache server if a client of that is given."""

    def __init__(self, endpoint: Endpoint, client: RemoteClient | None = None) -> None:
        self._endpoint = endpoint
        self._client = client

    def counts(self) -> Counts:
        metrics = self._endpoint.metrics()
        engine = None if metrics is None else tokens_by_level(metrics)
        if self._client is None:
            return Counts(engine, None, None)
        counters = self.stats().counters
        return Counts(engine, counters["get_hit"], counters.get("disk_promoted", 0))

    def stats(self) -> StatsReply:
        """Of the cache server. Raises `ServerUnavailable` or `DeadlineExceeded`."""
        assert self._client is not None
        return self._client.stats(timeout_s=10).result()


def tokens_from(answer: FirstToken, before: Counts, after: Counts) -> dict[str, int]:
    """How many tokens of the one prompt answered between the two came from each level.

    Levels with none are left out. Only right if nobody else used the engine meanwhile.
    """
    total = answer.prompt_tokens
    if total is None:
        return {}
    if before.engine is None or after.engine is None:
        if answer.cached_tokens is None:
            return {UNKNOWN: total}
        return _present({CACHED: answer.cached_tokens, COMPUTED: total - answer.cached_tokens})
    grown = {level: after.engine[level] - before.engine[level] for level in after.engine}
    found = {ENGINE: grown["engine"], POOL: grown["pool"], **_of_server(grown, before, after)}
    return _present({COMPUTED: total - sum(found.values()), **found})


def _of_server(grown: Mapping[str, int], before: Counts, after: Counts) -> dict[str, int]:
    tokens = grown["server"]
    if None in (before.got_blocks, after.got_blocks, before.from_disk, after.from_disk):
        return {SERVER: tokens}
    got = (after.got_blocks or 0) - (before.got_blocks or 0)
    disk = (after.from_disk or 0) - (before.from_disk or 0)
    # All blocks of a server are of equal size here: one engine, one model, whole blocks.
    from_disk = round(tokens * disk / got) if got else 0
    return {MEMORY: tokens - from_disk, DISK: from_disk}


def _present(tokens: Mapping[str, int]) -> dict[str, int]:
    return {level: count for level, count in tokens.items() if count}
