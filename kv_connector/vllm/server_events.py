"""KV events of the servers' blocks, which vLLM publishes to routers beside those of its own cache.

The servers do not push what they evict, so these events are what this engine has learned: it puts
or loads a block, and the block is there; a lookup or a load finds that it is not, or its server has
restarted or left, and it is gone. A router that must be exact asks a server.
"""

from collections.abc import Collection, Iterable, Mapping
from itertools import groupby, islice

from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent, OffloadKey

OWNER = "kvferry"
"""The tier of an event, in vLLM's field `ownership`."""

# vLLM keeps the tokens and hashes of each key that is announced, about 1 KB, until its removal.
MOST_ANNOUNCED = 131_072


class ServerEvents:
    """The announced keys, and the events that vLLM has not taken. Belongs to the scheduler
    thread."""

    def __init__(self, most_keys: int = MOST_ANNOUNCED) -> None:
        self._most_keys = most_keys
        self._announced: dict[OffloadKey, str] = {}
        """The server that holds each key, "" where there is one server. In order of their news."""
        self._news: list[tuple[OffloadKey, bool]] = []
        """Keys, and whether they were removed."""

    def held(self, keys: Iterable[OffloadKey], holders: Mapping[bytes, str] | None = None) -> None:
        """The servers `holders`, or the only one, hold these keys. Of more than `most_keys` the
        oldest are removed: a router counts a block too few rather than one too many."""
        for key in keys:
            if self._announced.pop(key, None) is None:
                self._news.append((key, False))
            self._announced[key] = holders.get(key, "") if holders else ""
        excess = max(0, len(self._announced) - self._most_keys)
        for key in [*islice(self._announced, excess)]:
            self._remove(key)

    def gone(self, keys: Iterable[OffloadKey]) -> None:
        """The servers do not hold these keys, announced or not."""
        for key in keys:
            if key in self._announced:
                self._remove(key)

    def server_lost(self, server: str) -> None:
        """`server` has restarted or left: what it held is gone, until it is found again."""
        self.gone([key for key, holder in self._announced.items() if holder == server])

    def forget(self) -> None:
        """No block of this engine can be found by its announced key any more."""
        self.gone([*self._announced])

    def take(self) -> Collection[OffloadingEvent]:
        """The events since the last call, in their order."""
        news, self._news = self._news, []
        return [
            OffloadingEvent(
                keys=[key for key, _ in some],
                medium=Medium.STORAGE,
                removed=removed,
                locality=Locality.REMOTE,
                ownership=OWNER,
                removal_expected=not removed,
            )
            for removed, some in groupby(news, key=lambda one: one[1])
        ]

    def _remove(self, key: OffloadKey) -> None:
        del self._announced[key]
        self._news.append((key, True))
