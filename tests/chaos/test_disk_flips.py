"""One bit on the server's disk, many times over: in headers and blocks, of files that no process
has open and of those that a server is reading from."""

import os
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from chaos_client import ChaosClient
from chaos_server import ChaosServer, eventually
from oracle import LARGE, MEDIUM, SMALL, content

from remote_server.store.disk.layout import PAGE

BLOCKS = [(SMALL, n) for n in range(40)] + [(MEDIUM, n) for n in range(30)]
BLOCKS += [(LARGE, n) for n in range(10)]

WIRES = "tcp", "lanes"


class Disk:
    """The files of a server, searched and damaged from outside."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def segments(self) -> list[Path]:
        return sorted(self.folder.glob("segment-*"))

    def find(self, blocks) -> dict:
        """Where the bytes of each block begin: a file and an offset."""
        files = {path: path.read_bytes() for path in self.segments()}
        places = {}
        for namespace, number in blocks:
            wanted = content(namespace, number)
            head = wanted[:64]  # a long needle is searched for at a tenth of the speed
            found = [
                (path, at)
                for path, d in files.items()
                if (at := d.find(head)) >= 0 and d.startswith(wanted, at)
            ]
            assert len(found) == 1, f"{namespace.name}/{number} is in {len(found)} files"
            places[namespace, number] = found[0]
        return places

    def flip(self, path: Path, offset: int, bit: int) -> None:
        """Change one bit behind the server's back, as a failing disk does."""
        with open(path, "r+b", buffering=0) as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ (1 << bit)]))
            os.fsync(file.fileno())

    def flip_each(self, rng, in_header, in_bytes) -> None:
        """One bit in the slot's header of each block of `in_header`, and in the bytes of each of
        `in_bytes`."""
        for block, (path, at) in self.find(BLOCKS).items():
            if block in in_header:
                self.flip(path, at - PAGE + rng.randrange(PAGE), rng.randrange(8))
            elif block in in_bytes:
                self.flip(path, at + rng.randrange(block[0].block_bytes), rng.randrange(8))


@pytest.fixture(params=[pytest.param(way, marks=pytest.mark.whole) for way in WIRES] + ["shm"])
def transport(request):
    """The files are below all transports, so the whole suite alone has more than one."""
    return request.param


@pytest.fixture
def disk(tmp_path):
    return Disk(tmp_path / "disk")


@pytest.fixture
def server(disk):
    """With a disk, in place of the one without."""
    with ChaosServer("32MiB", disk.folder, "64MiB") as server:
        yield server
        server.wait_until_at_rest()


def fill(server, transport, blocks):
    """Put what is not there, and wait until all of it is on disk."""
    with ChaosClient(server.endpoint, transport) as client:
        client.wait_until_ready()
        for namespace, number in blocks:
            assert client.finish(client.put(namespace, [number])) == "stored"
        expected = {ns.name: sum(b[0] is ns for b in BLOCKS) for ns in (SMALL, MEDIUM, LARGE)}
        eventually(
            lambda: {
                name: ns.share("disk").blocks for name, ns in server.stats().namespaces.items()
            } == expected,
            "all blocks are on disk, and nothing else",
        )  # fmt: skip


def restart(server, at_rest, found):
    """After a clean stop, and wait until everything that is left was checked: `found` slots, with
    damaged ones. Before a segment's headers are read, its blocks do not count as pending."""
    server.stop()
    at_rest()
    server.restart()
    names = [f"disk_{what}" for what in ("recovered", "recovered_damaged", "headers_damaged")]

    def checked():
        stats = server.stats()
        there = sum(stats.counters[name] for name in names)
        return there >= found and stats.tiers["disk"].pending == 0

    eventually(checked, "what was found was checked")
    return server.stats()


def ask(server, transport, seen):
    """The word that each block of its own get ends with; wrong bytes raise."""
    with ChaosClient(server.endpoint, transport) as client:
        client.wait_until_ready()
        words = {block: client.finish(client.get(block[0], [block[1]])) for block in BLOCKS}
        client.check()
    seen.update(words.values())
    return words


def missed(words):
    return {block for block, word in words.items() if word == "miss"}


@pytest.mark.timeout(300)
def test_a_bit_flipped_in_the_files_of_a_stopped_server_costs_its_block_and_no_other(
    server, disk, transport, whole, rng
):
    """Whole: 280 bits over each transport, half in slot headers and half in blocks."""
    seen, flips = Counter(), 0
    missing = BLOCKS
    for _ in range(7 if whole else 1):
        fill(server, transport, missing)
        victims = rng.sample(BLOCKS, 40)
        in_header, in_bytes = set(victims[:20]), set(victims[20:])
        harm = partial(disk.flip_each, rng, in_header, in_bytes)
        stats = restart(server, harm, len(BLOCKS))
        flips += len(victims)
        assert stats.counters["disk_headers_damaged"] == len(in_header)
        assert stats.counters["disk_recovered_damaged"] == len(in_bytes)
        assert stats.counters["disk_recovered"] == len(BLOCKS) - len(victims)
        words = ask(server, transport, seen)
        assert missed(words) == set(victims)
        assert set(words.values()) == {"hit", "miss"}
        missing = [block for block in BLOCKS if block in missed(words)]
    print(f"flipped in files of a stopped server, {transport}: {flips} bits; {dict(seen)}")


@pytest.mark.whole
@pytest.mark.timeout(300)
def test_a_bit_flipped_under_a_running_server_is_a_miss_where_it_is_read_and_never_wrong(
    server, disk, transport, rng
):
    """280 bits over each transport. A running server does not read slot headers again: what it
    wrote or found is served; they count at the next start."""
    seen, flips = Counter(), 0
    missing = BLOCKS
    for _ in range(7):
        fill(server, transport, missing)
        restart(server, lambda: None, len(BLOCKS))  # nothing is in its memory
        victims = rng.sample(BLOCKS, 40)
        in_header, in_bytes = set(victims[:20]), set(victims[20:])
        disk.flip_each(rng, in_header, in_bytes)
        flips += len(victims)
        words = ask(server, transport, seen)
        assert missed(words) == in_bytes
        assert set(words.values()) == {"hit", "miss"}
        counters = server.stats().counters
        assert counters["disk_read_damaged"] == counters["disk_promote_failed"] == len(in_bytes)
        after = restart(server, lambda: None, len(BLOCKS) - len(in_bytes))
        assert after.counters["disk_headers_damaged"] == len(in_header)
        assert after.counters["disk_recovered_damaged"] == 0, "a damaged block was not erased"
        assert missed(ask(server, transport, Counter())) == set(victims)
        missing = [block for block in BLOCKS if block in set(victims)]
    print(f"flipped in files of a running server, {transport}: {flips} bits; {dict(seen)}")
