"""Keys of one length as one binary: the same requests, smaller and faster; the array stays."""

import re
from pathlib import Path

import msgpack
import pytest
from client_helpers import NAMESPACE, hold_blocks
from client_helpers import key as client_key
from fake_server import PATIENCE_S, FakeServer, eventually
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from wire_peer import BLOCK_BYTES, block, key

import remote_server
from remote_server import protocol
from remote_server.client.connection.channel import check_keys
from remote_server.errors import LocalProtocolError
from remote_server.protocol import Get, Hello, Keep, Lookup, Put, Touch, Verify

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures"]

DOCUMENT = (Path(remote_server.__file__).parent / "PROTOCOL.md").read_text()
KEY_BYTES = len(key(0))


def header_of(message: protocol.Request) -> bytes:
    return protocol.encode(message)[1]


# ── the codec ────────────────────────────────────────────────────────────────────────────


@given(st.integers(1, 128), st.integers(0, 40), st.binary(min_size=1), st.integers(0, 1 << 62))
def test_a_message_comes_out_as_it_went_in(key_bytes, number, data, request_id):
    supply = data * (key_bytes * number // len(data) + 1)
    keys = [supply[n * key_bytes : (n + 1) * key_bytes] for n in range(number)]
    about = {"request_id": request_id, "namespace": "n", "keys": keys, "key_bytes": key_bytes}
    for kind in (Lookup, Get, Touch, Verify, Keep):
        message = kind(**about)
        decoded = protocol.decode_request(header_of(message))
        assert decoded == message
        assert {*map(type, decoded.keys)} <= {bytes}, "they are keys of a dict"


def test_the_example_of_the_document_is_what_is_sent():
    section = DOCUMENT.split("### Keys in one binary")[1].split("###")[0]
    example = "".join(re.findall(r"[0-9a-f]+(?=[ \n`])", section.split("`85 ")[1]))
    lookup = Lookup(request_id=7, namespace="n", keys=[b"a0", b"b1"], key_bytes=2)
    assert header_of(lookup).hex() == "85" + example


MALFORMED = [
    {"keys": bytes(10), "key_bytes": 3},
    {"keys": bytes(10), "key_bytes": 11},
    {"keys": bytes(10)},
    {"keys": bytes(10), "key_bytes": 0},
    {"keys": b""},
    {"keys": bytes(10), "key_bytes": -1},
    {"keys": bytes(10), "key_bytes": 1 << 64 - 1},
    {"keys": bytes(258), "key_bytes": 129},
    {"keys": bytes(10), "key_bytes": "5"},
    {"keys": bytes(10), "key_bytes": 2.5},
    {"keys": bytes(protocol.MAX_KEYS_PER_MESSAGE + 1), "key_bytes": 1},
    {"keys": bytes((protocol.MAX_KEYS_PER_MESSAGE + 1) * 128), "key_bytes": 128},
    {"keys": "ten bytes.", "key_bytes": 5},
    {"keys": [b"key"], "key_bytes": 3},
    {"keys": [], "key_bytes": 3},
    {"key_bytes": 3},
]


@pytest.mark.parametrize("fields", MALFORMED, ids=lambda fields: repr(fields)[:40])
def test_a_malformed_binary_costs_its_sender_an_error_and_nothing_else(peer, connect, fields):
    peer.hello()
    peer.put([1])
    other = connect()
    kinds = ("lookup", "put", "get", "touch", "verify")
    for kind in kinds:
        more = {"lengths": [], "checksums": []} if kind == "put" else {}
        header = {"type": kind, "request_id": 77, "namespace": "ns", **more, **fields}
        peer.socket.send_multipart([b"KVF1", msgpack.packb(header)])
        error, _ = peer.receive()
        assert (error.code, error.request_id) == ("bad_message", 77)
    for each in (peer, other):
        assert each.lookup([1, 2]).states == b"\2\0"
    assert peer.stats().counters["bad_messages_bad_message"] == len(kinds)


def test_the_most_keys_in_one_binary_are_answered(peer):
    peer.hello()
    peer.put([7])
    keys = [key(number) for number in range(protocol.MAX_KEYS_PER_MESSAGE)]
    lookup = Lookup(request_id=peer.next_id(), namespace="ns", keys=keys, key_bytes=KEY_BYTES)
    states = peer.ask(lookup).states
    assert (len(states), states[7], sum(states)) == (len(keys), 2, 2)


def test_every_request_with_keys_takes_both_forms(peer):
    assert peer.hello().packed_keys
    for key_bytes in (0, KEY_BYTES):
        form = {"namespace": "ns", "keys": [key(1), key(2)], "key_bytes": key_bytes}

        def ask(kind, *payload, form=form, **fields):
            return peer.ask(kind(request_id=peer.next_id(), **form, **fields), *payload)

        stored = ask(
            Put, block(1), block(2), lengths=[BLOCK_BYTES] * 2, checksums=[], deferred=False,
            force=True,
        )  # fmt: skip
        assert stored.created + stored.forced == 2
        assert ask(Lookup).states == b"\2\2"
        assert ask(Touch).touched == 2
        assert ask(Verify).intact == 2
        assert ask(Keep).kept == 2
        assert ask(Keep, keep=False).kept == 2
        peer.send(Get(request_id=peer.next_id(), stream=False, **form))
        got, payload = peer.receive()
        assert (got.found, b"".join(payload)) == ([0, 1], block(1) + block(2))


# ── the client ───────────────────────────────────────────────────────────────────────────


@pytest.fixture
def packs(monkeypatch):
    """Fake servers announce it."""
    honest = FakeServer.welcome
    monkeypatch.setattr(
        FakeServer, "welcome", lambda fake, asked: replace(honest(fake, asked), packed_keys=True)
    )


def last(fake: FakeServer, kind: type):
    return [asked.message for asked in fake.asked if isinstance(asked.message, kind)][-1]


def ask_all(client, keys) -> bytes:
    client.touch(NAMESPACE, keys).result(PATIENCE_S)
    return client.lookup(NAMESPACE, keys, timeout_s=PATIENCE_S).result(PATIENCE_S).states


def test_to_a_server_that_does_not_announce_it_keys_are_an_array(fake, client):
    hold_blocks(fake, range(1, 3))
    assert ask_all(client, [client_key(1), client_key(2)]) == b"\2\2"
    assert (last(fake, Lookup).key_bytes, last(fake, Touch).key_bytes) == (0, 0)


def test_to_one_that_does_they_are_one_binary(packs, fake, client):
    hold_blocks(fake, range(1, 3))
    keys = [client_key(1), client_key(2), client_key(3)]
    assert ask_all(client, keys) == b"\2\2\0"
    for kind in (Lookup, Touch):
        assert (last(fake, kind).key_bytes, last(fake, kind).keys) == (len(keys[0]), keys)


def test_each_part_of_a_long_lookup_is_one_binary(packs, fake, make_client):
    fake.max_keys = 2
    client = make_client(fake.endpoint)
    keys = [client_key(number) for number in range(5)]
    hold_blocks(fake, range(5))
    assert ask_all(client, keys) == b"\2" * 5
    lookups = [one.message for one in fake.asked if isinstance(one.message, Lookup)]
    assert [one.keys for one in lookups] == [keys[:2], keys[2:4], keys[4:]]
    assert {one.key_bytes for one in lookups} == {len(keys[0])}


def test_keys_of_several_lengths_are_an_array(packs, fake, client):
    hold_blocks(fake, range(1, 2))
    keys = [client_key(1), b"short", b"other"]
    assert ask_all(client, keys) == b"\2\0\0"
    assert (last(fake, Lookup).key_bytes, last(fake, Lookup).keys) == (0, keys)


def test_a_server_that_takes_the_place_of_another_is_asked_as_it_announces(
    monkeypatch, fake, make_client
):
    """Without a namespace of this client a request waits for no welcome."""
    fake.rules[Hello] = lambda asked: fake.send(
        asked, replace(fake.welcome(asked), packed_keys=True)
    )
    client = make_client(fake.endpoint)
    assert ask_all(client, [client_key(1)]) == b"\0"
    assert last(fake, Lookup).key_bytes
    fake.close()
    with FakeServer(fake.endpoint, epoch="epoch-2") as older:
        older.rules[Hello] = lambda asked: None
        eventually(lambda: any(isinstance(one.message, Hello) for one in older.asked))
        explained = client.lookup(NAMESPACE, [client_key(1)], timeout_s=PATIENCE_S, explain=True)
        eventually(lambda: any(isinstance(one.message, Lookup) for one in older.asked))
        assert last(older, Lookup).key_bytes == 0
        client.cancel_all(PATIENCE_S)
        assert explained.done()


def test_the_length_of_all_keys_is_known_and_a_key_that_no_message_carries_is_named():
    for keys, length in (
        ([b"ab", b"cd"], 2), ([b"ab"], 2), ([b"ab", b"abc"], 0), ([], 0), ([bytes(128)] * 3, 128)
    ):  # fmt: skip
        assert check_keys(keys) == length
    for bad in (b"", bytes(129), "text", bytearray(2), memoryview(b"ab"), None, 2):
        for others in (0, 1, 3):
            with pytest.raises(LocalProtocolError, match=f"key {others} is not"):
                check_keys([*[b"ab"] * others, bad, b"cd"])
