"""What the store answers: plain data, and who owns the pins in it."""

from collections import Counter
from typing import NamedTuple

from remote_server.store.slabs import Block


class KeyStates(NamedTuple):
    """The state of each key asked, a byte each, and how many from the first are readable."""

    states: bytes
    prefix: int


class Pinned(NamedTuple):
    """What a get can serve. `blocks` are pinned for the caller, who unpins each one once."""

    indices: list[int]  # into the keys asked; a key asked twice is named once
    blocks: list[Block]
    miss: int
    duplicate: int


class Found(NamedTuple):
    """What a streamed get can serve, each of its blocks pinned for the caller, or None where it
    must be fetched by its key first."""

    indices: list[int]  # into the keys asked; a key asked twice is named once
    keys: list[bytes]
    blocks: list[Block | None]
    miss: int
    duplicate: int


class Reserved(NamedTuple):
    """Where the blocks of a put go. The caller fills each and completes or fails it once."""

    outcomes: bytearray  # one `PutOutcome` per key
    indices: list[int]  # into the keys, where each of `blocks` came
    blocks: list[Block]
    reasons: Counter[str]  # why keys were declined


class Removed(NamedTuple):
    """How many blocks a clear removed. One that was in both tiers counts in both."""

    from_memory: int
    from_disk: int
