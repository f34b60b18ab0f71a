"""A server process that is killed right after it answered a clear, and what its disk has then."""

import os
from pathlib import Path

import zmq
from wire_peer import Peer

from remote_server.protocol import Clear, Cleared

LENGTH = 65_536
NUM_BLOCKS = 40
FLAGS = ("--memory", "16MiB", "--disk-bytes", "16MiB", "--no-populate")


def segments(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.startswith("segment-"))


def fill_and_clear(context: zmq.Context, endpoint: str, folder: Path, namespace: str | None):
    """The answer to a clear of blocks in several files, another clear of them under way."""
    with_disk = Peer(context, endpoint)
    with_disk.hello(block_bytes=LENGTH)
    with_disk.put(range(NUM_BLOCKS), length=LENGTH)
    with_disk.stats_once(lambda s: s.counters["disk_demoted"] == NUM_BLOCKS)
    assert len(segments(folder)) >= 3
    other = Peer(context, endpoint)
    other.hello(block_bytes=LENGTH)
    with_disk.send(Clear(request_id=with_disk.next_id(), namespace=namespace))
    # The second clear finds nothing, and its answer means the same.
    answer = other.ask(Clear(request_id=other.next_id(), namespace="ns"))
    assert isinstance(answer, Cleared)
    return answer
