"""The folder of a stopped server that held `ALL` blocks, and the next server over it."""

import threading
from pathlib import Path

from disk_helpers import RealDisk, budget_for, state_of

from remote_server.store.disk.layout import slot_bytes_for
from remote_server.store.disk.opening import OpenDisk
from remote_server.store.tier import Written
from remote_server.values import MiB

BLOCK = 8192
SLOTS, SEGMENTS = 4, 4
ALL = SLOTS * SEGMENTS
BUDGET, SEGMENT_BYTES = budget_for(SEGMENTS, SLOTS, BLOCK)
SLOT = slot_bytes_for(BLOCK)
LEFT = ALL - SLOTS
"""Without the blocks of one segment."""
KEYS = [b"%d" % number for number in range(ALL)]


def data_of(number: int) -> bytes:
    return number.to_bytes(4, "big") * (BLOCK // 4)


def segment(number: int) -> str:
    return f"segment-{number:08d}"


def stored_folder(parent: Path) -> Path:
    """As a server left it."""
    folder = parent / "disk"
    folder.mkdir(mode=0o700)
    OpenDisk(folder, 16 * MiB, wake=lambda: None).close()
    with RealDisk(folder, BUDGET, SEGMENT_BYTES) as disk:
        for number, key in enumerate(KEYS):
            assert disk.put(key, data_of(number)) is Written.OK
    return folder


class Started(RealDisk):
    """A tier over `folder`, opened as a server does, when everything was recovered."""

    def __init__(self, folder: Path) -> None:
        self.event = threading.Event()
        self._opened = OpenDisk(folder, 16 * MiB, wake=self.event.set)
        self.tier = self._opened.tier
        self.drain()

    def read_all(self) -> int:
        """How many of the blocks are there; each of them must be right."""
        there = [n for n, key in enumerate(KEYS) if state_of(self.tier, "ns", key)]
        assert [self.read(KEYS[n]) for n in there] == [*map(data_of, there)]
        return len(there)

    def close(self) -> None:
        self.tier.check()
        self._opened.close()
