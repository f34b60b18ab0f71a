"""The requests of a `CacheClient` with many parts, each as one immutable value.

`CacheClient` explains every part. It has checked the times, and the lists are copies of what the
caller gave.
"""

from collections.abc import Callable, Sequence
from typing import Self, TypeVar

import msgspec

from remote_server.protocol import Found, Hint, Stretch, select

T = TypeVar("T")

Anchors = Sequence[bytes | None]
"""For each key of a request the key of the first block of its run (`remote_server.runs`), which
decides its servers. None where that is not known: the key itself decides. Empty: none is known."""


class LookupRequest(msgspec.Struct, frozen=True, eq=False):
    """A lookup; see `CacheClient.lookup`."""

    namespace: str
    keys: list[bytes]
    timeout_s: float
    on_late: Callable[[Found], None] | None
    chain: Sequence[Stretch]
    explain: bool
    anchors: Anchors
    hint: Hint | None


class PutRequest(msgspec.Struct, frozen=True, eq=False):
    """A put; see `CacheClient.put`."""

    namespace: str
    keys: list[bytes]
    rows: list[memoryview]
    deferred: bool
    force: bool
    timeout_s: float
    chain: Sequence[Stretch]
    anchors: Anchors
    hot: bool

    def part(self, indices: Sequence[int]) -> Self:
        """The put of only these blocks, to one server."""
        return msgspec.structs.replace(
            self, keys=_at(self.keys, indices), rows=_at(self.rows, indices), anchors=(),
            chain=select(self.chain, indices) if self.chain else (),
        )  # fmt: skip


class GetRequest(msgspec.Struct, frozen=True, eq=False):
    """A get; see `CacheClient.get`."""

    namespace: str
    keys: list[bytes]
    rows: list[memoryview]
    stall_s: float
    timeout_s: float
    worth_s: float
    timed: bool
    anchors: Anchors

    def part(self, indices: Sequence[int]) -> Self:
        """The get of only these blocks, from one server."""
        return msgspec.structs.replace(
            self, keys=_at(self.keys, indices), rows=_at(self.rows, indices), anchors=()
        )


def _at(items: Sequence[T], indices: Sequence[int]) -> list[T]:
    return [items[index] for index in indices]
