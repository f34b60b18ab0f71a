"""One bit of a block on its way, a thousand times over.

One that rots in the server's memory is in `client/transfer/test_integrity.py`, and among the faults
of `weather.py`."""

from collections import Counter

import pytest
from chaos_client import retried
from faults import TO_CLIENT, TO_SERVER
from oracle import NAMESPACES
from tampering import flip_payload

NUMBERS = range(2)


class Flipper:
    """Requests of which one message each has one bit flipped, and what became of them."""

    def __init__(self, client, judge, proxy, rng):
        self.client, self.judge, self.proxy, self.rng = client, judge, proxy, rng
        self.seen = Counter()
        self._next_number = 1000
        for namespace in NAMESPACES:
            assert client.finish(client.put(namespace, NUMBERS)) == "stored"

    def flip(self, op, direction, type):
        """One case. False when the bit was not flipped: then it is none."""
        namespace = self.rng.choice(NAMESPACES)
        shot = self.proxy.shoot(direction, flip_payload, type)
        if op == "put":
            numbers = [self._next_number, self._next_number + 1]
            self._next_number += 2
            word = self.client.finish(self.client.put(namespace, numbers))
            # What was kept, by a client on another way, is right or not there.
            self.judge.finish(self.judge.get(namespace, numbers))
        else:
            word = self.client.finish(self.client.get(namespace, NUMBERS))
        hit = shot.hit.is_set()
        self.proxy.stand_down()
        self.seen[op, word] += hit
        for word, again in (("stored", self.client.put), ("hit", self.client.get)):
            retried(self.client, word, lambda timeout_s: again(namespace, NUMBERS, timeout_s))  # noqa: B023
        return hit

    def words(self, op):
        return {word for (what, word) in self.seen if what == op}


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
        assert flipper.flip("get", TO_CLIENT, down)
        assert flipper.flip("put", TO_SERVER, up)
    assert flipper.words("get") == {"corrupt"}
    assert flipper.words("put") == {"declined"}
