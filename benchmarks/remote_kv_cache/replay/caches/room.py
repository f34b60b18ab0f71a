"""Sizes of a real server for a number of small blocks, and the places it then has.

A replay needs places; a server takes bytes, and divides them into slabs and segments. Both replays
use the number of places that results.
"""

from collections.abc import Callable
from typing import NamedTuple

from remote_server.errors import ConfigError
from remote_server.server.config import MIN_MEMORY_BYTES
from remote_server.store.disk import layout
from remote_server.store.disk.opening import MIN_DISK_BYTES
from remote_server.store.disk.segments import OVERHEAD_BYTES, segment_bytes_for
from remote_server.store.memory.slabs import slab_bytes_for, slot_bytes_for
from remote_server.store.pages import PAGE

_PARTS = 16
"""The number of slabs or segments of a small budget."""

_ROUNDED = 8
"""A real server is taken for one of the wanted size when it has at most an eighth more places."""

_MOST_PAYLOAD = 1 << 20


class Room(NamedTuple):
    """A server's setting in bytes, and the places that it makes."""

    num_bytes: int
    places: int


def memory_for(blocks: int, block_bytes: int) -> Room:
    """Memory with at least `blocks` slots. A server has a minimum size, so there may be more."""
    slot_bytes = slot_bytes_for(block_bytes)
    slab_bytes = -(-(-(-blocks // _PARTS) * slot_bytes) // PAGE) * PAGE
    num_bytes = max(_PARTS * slab_bytes, MIN_MEMORY_BYTES)
    while (room := _memory(num_bytes, slot_bytes)).places < blocks:
        num_bytes += _PARTS * PAGE
    return room


def disk_for(blocks: int, block_bytes: int) -> Room:
    """A directory with at least `blocks` slots; none for 0."""
    if not blocks:
        return Room(0, 0)
    slot_bytes = layout.slot_bytes_for(block_bytes)
    num_bytes = OVERHEAD_BYTES + _PARTS * (PAGE + -(-blocks // _PARTS) * slot_bytes)
    num_bytes = max(num_bytes, MIN_DISK_BYTES)
    while (room := _disk(num_bytes, block_bytes)).places < blocks:
        num_bytes += _PARTS * PAGE
    return room


def _memory(num_bytes: int, slot_bytes: int) -> Room:
    slab_bytes = slab_bytes_for(num_bytes)
    return Room(num_bytes, (num_bytes // slab_bytes) * (slab_bytes // slot_bytes))


def _disk(num_bytes: int, block_bytes: int) -> Room:
    segment_bytes = segment_bytes_for(num_bytes)
    segments = (num_bytes - OVERHEAD_BYTES) // segment_bytes
    return Room(num_bytes, segments * layout.num_slots(segment_bytes, block_bytes))


def require_size(
    option: str, blocks: int, payload: int, room_for: Callable[[int, int], Room],
    can_change: bool = True,
) -> None:  # fmt: skip
    """Raise `ConfigError` unless the real server that `room_for` sizes has about as many places as
    `blocks`. A server has a minimum size in bytes, so with a small payload its places may be many
    times those of the option, and a replay would be of another size than the one named.
    `can_change`: whether `--payload` applies."""
    places = room_for(blocks, payload).places
    if places <= blocks + blocks // _ROUNDED:
        return
    larger = payload
    while room_for(blocks, larger).places > blocks + blocks // _ROUNDED:
        if (larger := 2 * larger) > _MOST_PAYLOAD:
            can_change = False
            break
    cure = f"take --payload {larger} or more, or " if can_change else "take "
    raise ConfigError(
        f"{option}: {blocks:,} blocks; over the wire, the smallest real server has room for "
        f"{places:,} of {payload} bytes: {cure}a larger size, or --replay store"
    )
