"""Sources of a prompt's tokens, proven by the counters of the engine and the cache server.

An engine with kvferry counts its own cache, the CPU pool and the server separately in `/metrics`;
the server's statistics separate its memory and its disk. Missing counters are not guessed: without
the server's statistics its tokens are `server`, and without the engine's counters they are
`cached`, if the answer has that number.
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
"""Levels with fewer counters: memory or disk; any but computed; any."""


@dataclass(frozen=True)
class Counts:
    """Counts at one moment. None where there is no counter."""

    engine: Mapping[str, int] | None
    got_blocks: int | None  # sent by the cache server
    from_disk: int | None  # those of them that only its disk had


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
        """Statistics of the cache server. Raises `ServerUnavailable` or `DeadlineExceeded`."""
        assert self._client is not None
        return self._client.stats(timeout_s=10).result()


def tokens_from(answer: FirstToken, before: Counts, after: Counts) -> dict[str, int]:
    """The number of tokens from each level for the one prompt answered between the two counts.

    Levels without tokens are omitted. Only right if no other client used the engine meanwhile.
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
