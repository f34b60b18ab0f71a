"""Nonsense on the wire: answered, counted by reason, and harmless to everyone else."""

import random

import msgpack
import pytest
from shared_messages import shared_get, shared_put
from wire_peer import BLOCK_BYTES, block, key

from remote_server import protocol
from remote_server.protocol import Error, Found, Get, Hello, Lookup, Put

pytestmark = pytest.mark.real_time


def error_for(peer, *frames: bytes) -> Error:
    peer.socket.send_multipart(frames)
    reply, payload = peer.receive()
    assert isinstance(reply, Error)
    assert not payload
    return reply


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([b""], "bad_magic"),
        ([b"", b"KVF1", b"\x80"], "bad_magic"),
        ([b"KVF2", b"\x80"], "bad_magic"),
        ([b"KVF1x", b"\x80"], "bad_magic"),
        ([b"GET / HTTP/1.1\r\n\r\n"], "bad_magic"),
        ([b"KVF1"], "bad_message"),
        ([b"KVF1", b""], "bad_message"),
        ([b"KVF1", b"\xc1"], "bad_message"),
        ([b"KVF1", b"\x91" * 100_000], "bad_message"),
        ([b"KVF1", b"\x80" + bytes(5 << 20)], "bad_message"),
        ([b"KVF1", msgpack.packb([1, 2])], "bad_message"),
        ([b"KVF1", msgpack.packb({"type": "found", "request_id": 1})], "bad_message"),
        ([b"KVF1", msgpack.packb({"type": "explode", "request_id": 1})], "bad_message"),
        ([b"KVF1", msgpack.packb({"type": "stats"})], "bad_message"),
        ([b"KVF1", msgpack.packb({"type": "stats", "request_id": -1})], "bad_message"),
        ([b"KVF1", msgpack.packb({"type": "stats", "request_id": 1}), b"payload"], "bad_request"),
    ],
)
def test_an_unreadable_message_is_answered_and_counted_by_reason(peer, frames, code):
    assert error_for(peer, *frames).code == code
    assert peer.stats().counters[f"bad_messages_{code}"] == 1


def test_an_error_names_the_request_when_that_much_is_readable(peer):
    bad_keys = msgpack.packb({"type": "lookup", "request_id": 77, "namespace": "ns", "keys": 5})
    assert error_for(peer, b"KVF1", bad_keys).request_id == 77
    assert error_for(peer, b"KVF1", b"\xc1").request_id == 0
    assert error_for(peer, b"nonsense").request_id == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"keys": []},
        {"keys": [b""]},
        {"keys": [b"x" * (protocol.MAX_KEY_BYTES + 1)]},
        {"keys": ["text"]},
        {"namespace": ""},
        {"namespace": "n" * 129},
        {"keys": [b"x"] * (protocol.MAX_KEYS_PER_MESSAGE + 1)},
    ],
)
def test_limits_on_keys_and_namespaces_hold(peer, fields):
    header = {"type": "lookup", "request_id": 1, "namespace": "ns", "keys": [b"k"], **fields}
    peer.socket.send_multipart([b"KVF1", msgpack.packb(header)])
    reply, _ = peer.receive()
    if fields == {"keys": []}:
        assert reply.prefix == 0
        assert reply.states == b""
    else:
        assert reply.code == "bad_message"


@pytest.mark.parametrize(
    ("fields", "payload", "code", "complaint"),
    [
        ({"lengths": [BLOCK_BYTES]}, 2, "bad_request", "2 keys, 1 lengths"),
        ({"checksums": [0, 0, 0]}, 2, "bad_request", "3 checksums"),
        ({"lengths": [BLOCK_BYTES, 100]}, 2, "bad_request", "frame 1 holds 4096 bytes"),
        ({"lengths": [BLOCK_BYTES, 0]}, 2, "bad_request", "no bytes"),
        ({}, 1, "bad_request", "need 2 payload frames, got 1"),
        ({}, 3, "bad_request", "need 2 payload frames, got 3"),
        ({}, 0, "bad_request", "got 0"),
        ({"blocks_per_frame": 2}, 2, "bad_request", "need 1 payload frames"),
        ({"lengths": [BLOCK_BYTES, BLOCK_BYTES + 1]}, 2, "too_large", "at most 4096"),
        ({"lengths": [BLOCK_BYTES, 1 << 62]}, 2, "too_large", "at most 4096"),
        ({"namespace": "never declared"}, 2, "unknown_namespace", "send hello"),
    ],
)
def test_a_put_that_contradicts_itself_changes_nothing(peer, fields, payload, code, complaint):
    put = {"namespace": "ns", "lengths": [BLOCK_BYTES] * 2, "checksums": [0, 0], **fields}
    message = Put(request_id=peer.next_id(), keys=[key(1), key(2)], **put)
    error = peer.ask(message, *[block(n) for n in range(payload)])
    assert (error.code, complaint in error.message) == (code, True), error.message
    stats = peer.stats()
    assert stats.counters["put_total"] == stats.counters["bytes_in"] == 0
    assert stats.tiers["memory"].used_bytes == 0


def test_a_put_beyond_the_message_limit_is_too_large(connect, monkeypatch):
    monkeypatch.setattr(protocol, "MAX_MESSAGE_BYTES", 3 * BLOCK_BYTES)
    peer = connect()
    peer.hello()
    assert peer.put(range(4)).code == "too_large"
    assert peer.put(range(3)).created == 3


def test_a_whole_get_beyond_the_message_limit_is_too_large_and_pins_nothing(peer, monkeypatch):
    peer.put(range(4))
    monkeypatch.setattr(protocol, "MAX_MESSAGE_BYTES", 3 * BLOCK_BYTES)
    get = Get(
        request_id=peer.next_id(), namespace="ns", keys=[key(n) for n in range(4)], stream=False
    )
    assert peer.ask(get).code == "too_large"
    assert peer.stats().tiers["memory"].pinned == 0
    assert len(peer.get(range(4))[1]) == 4


def test_a_namespace_declared_with_another_block_size_is_refused_and_stays(peer):
    assert peer.put([0]).created == 1
    error = peer.hello(block_bytes=8192)
    assert (error.code, "4096" in error.message) == ("block_bytes_mismatch", True)
    assert peer.put([1]).created == 1
    assert peer.stats().counters["refused_block_bytes_mismatch"] == 1


def test_a_block_larger_than_a_slab_is_refused_at_hello(connect):
    error = connect().hello(block_bytes=2 << 20)
    assert error.code == "too_large"
    assert "--memory 33554432 (32.0 MiB) would be enough" in error.message


def test_another_protocol_version_is_refused(connect):
    peer = connect()
    hello = Hello(request_id=9, protocol=3, namespace="ns", block_bytes=1)
    assert peer.ask(hello).code == "unsupported_protocol"


def test_a_fingerprint_has_a_limit(connect):
    error = connect().hello(fingerprint={f"field {n}": "" for n in range(65)})
    assert error.code == "bad_request"


def test_three_bad_requests_then_a_good_one_on_the_same_socket(peer):
    assert error_for(peer, b"x").code == "bad_magic"
    assert peer.put([1], namespace="other").code == "unknown_namespace"
    assert peer.hello(block_bytes=2 << 20).code == "too_large"
    assert peer.put([1]).created == 1


def test_a_frame_above_the_limit_ends_only_its_own_connection(peer, connect):
    rude = connect()
    rude.hello("rude")
    rude.socket.send_multipart([b"KVF1", bytes(protocol.MAX_FRAME_BYTES + 1)])
    # libzmq closes the connection and connects again; what follows is a new start.
    assert peer.put([1]).created == 1
    assert peer.get([1])[1] == [(0, block(1))]
    reply = rude.hello("rude again")
    assert reply.max_frame_bytes == protocol.MAX_FRAME_BYTES
    assert "rude again" in peer.stats().namespaces


def malformed(random: random.Random) -> list[bytes]:
    """A message that is nearly right, or not at all."""
    put = Put(
        request_id=random.randrange(1 << 40), namespace="ns", keys=[key(random.randrange(8))],
        lengths=[random.choice([0, 1, BLOCK_BYTES, BLOCK_BYTES + 1])], checksums=[0],
        blocks_per_frame=random.choice([1, 2, 1 << 62]), force=True,
    )  # fmt: skip
    lookup = Lookup(request_id=1, namespace="ns", keys=[key(1)])
    near_put = shared_put(
        request_id=1, namespace="ns", keys=[key(1)], region=random.choice([0, 1, 1 << 62]),
        offsets=[random.choice([0, 1 << 62])], lengths=[BLOCK_BYTES], checksums=[], ticket=0,
        ticket_value=1,
    )  # fmt: skip
    near_get = shared_get(request_id=1, namespace="ns", keys=[key(1)], region=1)
    magic, header = protocol.encode(random.choice([put, lookup, near_put, near_get]))
    match random.randrange(7):
        case 0:
            return [random.randbytes(random.randrange(20)) for _ in range(random.randrange(1, 5))]
        case 1:
            return [magic, header[: random.randrange(len(header))]]
        case 2:
            at = random.randrange(len(header))
            return [magic, header[:at] + random.randbytes(1) + header[at + 1 :]]
        case 3:
            return [magic, random.randbytes(random.randrange(200))]
        case 4:
            return [magic, header, *[b""] * random.randrange(1, 4)]
        case 5:
            return [random.choice([b"", b"KVF", b"kvf1", magic * 2]), header, block(1)]
        case _:
            return [magic, header, random.randbytes(random.choice([1, 4095, BLOCK_BYTES + 1]))]


def test_10_000_malformed_messages_do_not_disturb_a_good_client(peer, connect, server):
    numbers = random.Random(20_240_601)
    peer.put(range(100, 110))
    rude = connect()
    for count in range(10_000):
        rude.socket.send_multipart(malformed(numbers))
        rude.receive()
        if count % 500 == 0:
            assert peer.lookup(range(100, 110)).prefix == 10
            assert peer.get(range(100, 110))[1] == [(i, block(100 + i)) for i in range(10)]
    stats = peer.stats()
    refused = sum(n for name, n in stats.counters.items() if name.startswith("bad_messages_"))
    assert refused > 8_000, "most of these were really malformed"
    assert stats.counters["get_hit"] == 10 * 20
    assert stats.counters.get("refused_internal", 0) == 0


def test_a_lookup_of_the_most_keys_allowed_is_answered(peer):
    keys = [b"%0128d" % n for n in range(protocol.MAX_KEYS_PER_MESSAGE)]
    found = peer.ask(Lookup(request_id=peer.next_id(), namespace="ns", keys=keys))
    assert isinstance(found, Found)
    assert found.states == bytes(len(keys))
