"""A working set of eight times the server's memory: all of it served, every block accounted for."""

from collections import deque

import pytest
from chaos_client import PIECE_BYTES, ChaosClient
from chaos_server import ChaosServer, eventually, resident_bytes
from oracle import Namespace

KiB, MiB = 1 << 10, 1 << 20
ROUNDS = 3
UNDER_WAY = 8


def drive(client, requests, word):
    """All of `requests`, some under way at a time; each ends with `word`."""
    under_way = deque()
    for request in requests:
        under_way.append(request())
        if len(under_way) == UNDER_WAY:
            assert client.finish(under_way.popleft()) == word
    while under_way:
        assert client.finish(under_way.popleft()) == word


@pytest.mark.timeout(300)
def test_a_working_set_of_eight_memories_is_served_whole_and_the_server_does_not_grow(
    tmp_path, whole
):
    """Whole: 256 MiB of memory, 4 GiB of disk, 2 GiB of blocks of 1 MiB."""
    memory, disk = ("256MiB", "4GiB") if whole else ("8MiB", "128MiB")
    block_bytes = MiB if whole else 256 * KiB
    num_blocks = (2048 if whole else 64) * MiB // block_bytes
    together = PIECE_BYTES // block_bytes
    big = Namespace("big", block_bytes, num_blocks, together)
    parts = [range(first, first + together) for first in range(0, num_blocks, together)]
    with ChaosServer(memory, tmp_path / "disk", disk) as server:
        with ChaosClient(server.endpoint, "tcp", namespaces=[big]) as client:
            client.wait_until_ready()
            for part in parts:  # each on disk before the next: memory may evict what waits for it
                assert client.finish(client.put(big, part)) == "stored"
                eventually(
                    lambda last=part[-1]: server.stats().counters["disk_demoted"] == last + 1,
                    "what was put is on disk",
                )
        sizes = []
        for number in range(ROUNDS):
            transport = ("tcp", "shm")[number % 2]
            with ChaosClient(
                server.endpoint, transport, num_pieces=UNDER_WAY, namespaces=[big]
            ) as client:
                client.wait_until_ready()
                gets = [lambda part=part: client.get(big, part) for part in parts]
                drive(client, gets, "hit")
                client.check()
            server.wait_until_at_rest()
            sizes.append(resident_bytes(server.pid))
        stats = server.wait_until_at_rest()
        counters = stats.counters
        assert counters["put_total"] == counters["put_created"] == num_blocks
        assert counters["get_total"] == counters["get_hit"] == ROUNDS * num_blocks
        assert counters["disk_lost"] == counters["disk_promote_no_slot"] == 0
        assert counters["disk_read"] == counters["disk_promoted"]
        came, left = num_blocks + counters["disk_promoted"], counters["evicted"]
        assert stats.tiers["memory"].blocks == came - left
        assert counters["disk_written"] == counters["disk_demoted"] == num_blocks
        assert stats.tiers["disk"].blocks == num_blocks, "the disk evicted, and has twice the room"
        assert counters["disk_promoted"] > (ROUNDS - 1) * num_blocks, "memory held it all"
        files = sum(path.stat().st_size for path in server.disk.iterdir())
        assert files <= stats.tiers["disk"].budget_bytes
        growth = max(sizes) - sizes[0]
        assert growth <= max(4 * MiB, sizes[0] // 50), f"it grew by {growth} bytes: {sizes}"
    print(
        f"{counters['get_hit']} of {counters['get_total']} keys hit, resident "
        f"{min(sizes) / MiB:.1f} to {max(sizes) / MiB:.1f} MiB"
    )
