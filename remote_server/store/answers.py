"""Results of the store: plain data, and the owner of its pins."""

from collections import Counter
from typing import NamedTuple

from remote_server.store.slabs import Block


class KeyStates(NamedTuple):
    """The state of each key, one byte each, and the length of the readable prefix."""

    states: bytes
    prefix: int


class Pinned(NamedTuple):
    """The blocks that a get can send. `blocks` are pinned for the caller, who unpins each once."""

    indices: list[int]  # into the keys requested; a repeated key has one entry
    blocks: list[Block]
    miss: int
    duplicate: int


class Found(NamedTuple):
    """The blocks that a streamed get can send: each pinned for the caller, or None where it must be
    fetched by its key first."""

    indices: list[int]  # into the keys requested; a repeated key has one entry
    keys: list[bytes]
    blocks: list[Block | None]
    miss: int
    duplicate: int


class Reserved(NamedTuple):
    """The slots of a put's blocks. The caller fills each and completes or fails it once."""

    outcomes: bytearray  # one `PutOutcome` per key
    indices: list[int]  # of each of `blocks`, into the keys
    blocks: list[Block]
    reasons: Counter[str]  # of declined keys


class Removed(NamedTuple):
    """The blocks that a clear removed. A block that was in both tiers counts in both."""

    from_memory: int
    from_disk: int
