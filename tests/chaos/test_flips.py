"""One bit, a thousand times over: on the way, and in the server's memory."""

from collections import Counter

import pytest
from chaos_client import REQUEST_S, ChaosClient, retried
from chaos_server import eventually
from faults import TO_CLIENT, TO_SERVER
from oracle import LARGE, MEDIUM, NAMESPACES, SMALL, content
from tampering import FLIPS

NUMBERS = range(2)

_PATIENCE_S = 0.15  # most of what is hit by a flip beside blocks is never answered

ON_THE_WAY = {
    "tcp": {
        ("get", TO_CLIENT): ("got", "blocks"),
        ("get", TO_SERVER): ("get",),
        ("put", TO_SERVER): ("put",),
        ("put", TO_CLIENT): ("stored",),
        ("lookup", TO_SERVER): ("lookup",),
        ("lookup", TO_CLIENT): ("found",),
    },
    "lanes": {
        ("get", TO_CLIENT): ("got", "blocks", "lane"),
        ("get", TO_SERVER): ("get",),
        ("put", TO_SERVER): ("put", "lane"),
        ("put", TO_CLIENT): ("stored",),
    },
    "shm": {
        ("get", TO_CLIENT): ("got",),
        ("get", TO_SERVER): ("get", "release"),
        ("put", TO_SERVER): ("put",),
        ("put", TO_CLIENT): ("stored",),
    },
}


class Flipper:
    """Requests of which one message each has one bit flipped, and what became of them."""

    def __init__(self, client, judge, proxy, rng):
        self.client, self.judge, self.proxy, self.rng = client, judge, proxy, rng
        self.seen = Counter()
        self._next_number = 1000
        for namespace in NAMESPACES:
            assert client.finish(client.put(namespace, NUMBERS)) == "stored"

    def flip(self, place, op, direction, type):
        """One case. False when the bit was not flipped: then it is none."""
        timeout_s = REQUEST_S if place == "payload" else _PATIENCE_S
        namespace = self.rng.choice(NAMESPACES)
        shot = self.proxy.shoot(direction, FLIPS[place], type)
        if op == "put":
            numbers = [self._next_number, self._next_number + 1]
            self._next_number += 2
            word = self.client.finish(self.client.put(namespace, numbers, timeout_s))
            # What was kept, by a client on another way, is right or not there.
            self.judge.finish(self.judge.get(namespace, numbers))
        elif op == "get":
            word = self.client.finish(self.client.get(namespace, NUMBERS, timeout_s))
        else:
            word = self.client.finish(self.client.lookup(namespace, NUMBERS, timeout_s))
        hit = shot.hit.is_set()
        self.proxy.stand_down()
        if hit:
            self.seen[place, op, word] += 1
        if word not in ("hit", "stored", "answered"):
            self._recover(namespace)
        return hit

    def _recover(self, ns):
        for word, op in (("stored", self.client.put), ("hit", self.client.get)):
            retried(self.client, word, lambda timeout_s: op(ns, NUMBERS, timeout_s))  # noqa: B023

    def words(self, place, op):
        return {word for (there, what, word) in self.seen if (there, what) == (place, op)}


@pytest.fixture
def server(renewed_server):
    return renewed_server


@pytest.fixture
def flipper(make_client, transport, server, proxy, rng):
    flipper = Flipper(make_client(transport), make_client(transport, server.endpoint), proxy, rng)
    yield flipper
    print(f"flipped on the way, {transport}: {flipper.seen.total()}: {flipper.seen}")


def test_a_block_with_a_bit_flipped_on_its_way_is_never_announced(flipper, transport, whole):
    """Whole: 500 over tcp and over lanes each. Over shared memory no block is on the wire."""
    if transport == "shm":
        pytest.skip("no payload on this wire")
    down, up = ("lane", "lane") if transport == "lanes" else ("blocks", "put")
    for _ in range(250 if whole else 10):
        assert flipper.flip("payload", "get", TO_CLIENT, down)
        assert flipper.flip("payload", "put", TO_SERVER, up)
    assert flipper.words("payload", "get") == {"corrupt"}
    assert flipper.words("payload", "put") == {"declined"}


@pytest.mark.timeout(300)
def test_a_bit_flipped_in_what_surrounds_blocks_costs_a_miss_at_most(
    flipper, transport, whole, rng
):
    """Whole: 250 over each transport, in headers, lengths, flags and magic."""
    cases = [
        (op, direction, type)
        for (op, direction), types in ON_THE_WAY[transport].items()
        for type in types
    ]
    left = {"header": 150 if whole else 6, "framing": 100 if whole else 4}
    for place, number in left.items():
        while number:
            number -= flipper.flip(place, *rng.choice(cases))


def test_a_block_with_a_bit_flipped_in_memory_is_never_announced_and_leaves(
    server, transport, whole, rng
):
    """Whole: 500 over each transport, every one of them named corrupt and removed."""
    blocks = [(SMALL, n) for n in range(30)] + [(MEDIUM, n) for n in range(16)]
    blocks += [(LARGE, n) for n in range(4)]
    removed = 0
    with ChaosClient(server.endpoint, transport) as client:
        client.wait_until_ready()
        for _ in range(10 if whole else 1):
            for namespace, number in blocks:
                assert client.finish(client.put(namespace, [number])) == "stored"
            image = server.image()
            removed += len(blocks)
            for namespace, number in blocks:
                byte, bit = rng.randrange(namespace.block_bytes), rng.randrange(8)
                places = places_of(content(namespace, number), image)
                assert places, "the block is not in the arena"
                for at in places:
                    server.flip(at + byte, bit)
            for word in ("corrupt", "miss"):
                words = [client.finish(client.get(ns, [number])) for ns, number in blocks]
                assert words == [word] * len(blocks)
                eventually(
                    lambda expected=removed: client.client.counters()["verify_removed"] == expected,
                    "every bad copy is removed",
                )
        client.check()


def places_of(block, image):
    """Where the arena has these bytes: earlier tests may have left a copy in a free slot."""
    places, at = [], image.find(block)
    while at >= 0:
        places.append(at)
        at = image.find(block, at + 1)
    return places
