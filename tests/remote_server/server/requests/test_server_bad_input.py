"""Nonsense on the wire: answered, counted by reason, and harmless to everyone else."""

import msgpack
import pytest
from wire_peer import BLOCK_BYTES, block, key

from remote_server import protocol
from remote_server.protocol import Error, Get, Put, Welcome

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
        ({}, 0, "bad_request", "need 2 payload frames, got 0"),
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
    assert stats.counters["integrity_length"] == ("frame" in complaint)
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


def test_a_fingerprint_that_is_too_large_is_refused_with_the_reason(connect):
    peer = connect()
    for fields, chars in ((65, 0), (17, 1_000)):
        refused = peer.hello("large", fingerprint={f"{n:<8}": "x" * chars for n in range(fields)})
        assert refused.code == "bad_request"
        assert ("at most 16384" if chars else "at most 64") in refused.message
    assert "large" not in peer.stats().namespaces
    allowed = {f"{n:<8}": "x" * 1_000 for n in range(16)}
    assert isinstance(peer.hello("fits", fingerprint=allowed), Welcome)


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
