"""A router that follows a server's events knows what it holds, or knows that it does not know."""

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from random import Random, SystemRandom
from types import SimpleNamespace

import msgpack
import msgspec
import pytest
import zmq
from fake_server import eventually
from follower import Follower, Picture
from lent import lent
from memory_server import memory_server
from wire_peer import BLOCK_BYTES, Peer

from remote_server.errors import ConfigError
from remote_server.protocol import Clear
from remote_server.server.config import ServerConfig
from remote_server.server.reports import kv_events
from remote_server.server.reports.kv_events import Feed
from remote_server.server.server import Server
from remote_server.store.presence import News, Presence, hash_of
from remote_server.values import MiB

pytestmark = pytest.mark.real_time

APART = 10_000
"""The last four bytes of a key are the number of a group, so those of tests differ before."""

EVENTS = {"events": "tcp://127.0.0.1:*"}


def vllm_key(number: int, group: int = 0) -> bytes:
    return number.to_bytes(32, "big") + group.to_bytes(4, "big")


@pytest.fixture(params=["map", "array"])
def followed(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Memory for 512 blocks."""
    with memory_server(**EVENTS, events_format=request.param, memory=2 * MiB) as server:
        yield server


@pytest.fixture
def source(context: zmq.Context) -> Iterator[SimpleNamespace]:
    """A feed on its own: `news` are what it publishes, `feed` is it."""
    tenant, clock = Presence([]), SimpleNamespace(now=0.0)
    feed = Feed(context, EVENTS["events"], "one", {"": tenant}, lambda: clock.now)
    yield SimpleNamespace(feed=feed, news=tenant.news, clock=clock)
    feed.close()


def came(namespace: str, key: bytes, tokens: int = 16) -> News:
    group = int.from_bytes(key[-4:], "big")
    return News(namespace, group, tokens, True, [key], [hash_of(key)])


def went(namespace: str, key: bytes) -> News:
    return News(namespace, int.from_bytes(key[-4:], "big"), 0, False, [key], [hash_of(key)])


def publish(source: SimpleNamespace, *news: News) -> None:
    source.news.extend(news)
    source.clock.now += kv_events.FLUSH_S
    source.feed.take_turn()


def replay(source: SimpleNamespace, follower: Follower, first: int) -> Picture:
    """What a follower that missed everything learns from a replay."""
    picture = Picture()
    batches = follower.replayed(first)
    done = threading.Event()

    def serve() -> None:
        while not done.is_set():
            if source.feed.replays.poll(10):
                source.feed.take_requests()
            source.feed.take_turn()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        for batch in batches:
            picture.take(*batch)
    finally:
        done.set()
        thread.join()
    return picture


def test_a_batch_is_as_an_engine_publishes_it(source: SimpleNamespace, context: zmq.Context):
    subscriber = lent(context.socket(zmq.SUB))
    subscriber.subscribe(b"kv@one@")
    subscriber.connect(source.feed.endpoints[0])
    key, other = vllm_key(5 << 64 | 7, 3), vllm_key(9, 3)

    def arrived() -> bool:
        publish(source, came("llama@ab", key), went("llama@ab", other))
        return bool(subscriber.poll(10))

    eventually(arrived)
    topic, number, payload = subscriber.recv_multipart()
    assert topic == b"kv@one@llama:ab"
    assert int.from_bytes(number, "big") > 0
    time_s, events = msgpack.unpackb(payload)
    assert time_s > 1e9
    common = {"medium": "STORAGE", "group_idx": 3, "locality": "REMOTE", "ownership": "one"}
    assert events == [
        {
            "type": "BlockStored", "block_hashes": [7], "parent_block_hash": None, "token_ids": [],
            "block_size": 16, "lora_id": None, "lora_name": None, **common,
        },
        {"type": "BlockRemoved", "block_hashes": [9], **common},
    ]  # fmt: skip


def test_an_array_has_the_bytes_that_routers_document(context: zmq.Context):
    """Places 0 to 8 of BlockStored and 0 to 2 of BlockRemoved, then the group."""
    tenant, clock = Presence([]), SimpleNamespace(now=0.0)
    feed = Feed(context, EVENTS["events"], "one", {"": tenant}, lambda: clock.now, as_maps=False)
    try:
        news = [came("ns", vllm_key(5 << 64 | 7, 3)), went("ns", vllm_key(9, 3))]
        batches = [msgspec.msgpack.encode(feed._event(one, one.hashes)) for one in news]
        cleared = feed._kept[0][2]
    finally:
        feed.close()
    stored, removed = batches
    assert stored == (b"\x9a\xabBlockStored\x91\x07\xc0\x90\x10\xc0\xa7STORAGE\xc0\xc0\x03"), (
        "ten places"
    )
    assert removed == b"\x94\xacBlockRemoved\x91\x09\xa7STORAGE\x03"
    assert cleared[:1] == b"\x92" and cleared[10:] == b"\x91\x91\xb0AllBlocksCleared"


def test_a_replay_has_the_batches_in_order_and_an_end(source, context):
    follower = Follower(context, *source.feed.endpoints)
    for number in range(250):
        publish(source, came("ns", vllm_key(number)))
    picture = replay(source, follower, 0)
    assert not picture.has_gap
    assert picture.blocks == {b"kv@one@ns": {*range(250)}}
    last = picture.next_number - 1
    later = replay(source, follower, last)
    assert later.has_gap and later.blocks == {b"kv@one@ns": {249}}
    assert not replay(source, follower, (1 << 64) - 2).blocks


def test_a_follower_finds_a_gap_where_the_publisher_kept_no_more(source, context, monkeypatch):
    monkeypatch.setattr(kv_events, "REPLAY_BYTES", 2000)
    follower = Follower(context, *source.feed.endpoints)
    for number in range(100):
        publish(source, came("ns", vllm_key(number)))
    assert source.feed._kept_bytes <= 2000
    picture = replay(source, follower, 0)
    assert picture.has_gap and 0 < len(picture.blocks[b"kv@one@ns"]) < 100


def test_what_is_no_request_begins_no_replay(source, context):
    asker = lent(context.socket(zmq.DEALER))
    asker.connect(source.feed.endpoints[1])
    for frames in ([b""], [b"", b"short"], [b"12345678"], [b"", b"12345678", b"more"]):
        asker.send_multipart(frames)
        assert source.feed.replays.poll(60_000)
        source.feed.take_requests()
        assert not source.feed._replays


def followed_to_the_end(server: Server, follower: Follower) -> Picture:
    """What the follower knows when the server has sent all of its news: replays fill gaps."""
    feed = server.feed
    assert feed is not None
    eventually(lambda: not feed.is_waiting)
    picture = follower.picture
    while follower.read(patience_ms=0):
        pass
    for batch in follower.replayed(picture.next_number):
        picture.take(*batch)
    assert not picture.has_gap
    return picture


def truth_of(server: Server, namespace: str) -> set[int]:
    keys = server.loop_calls.call(lambda: server.store.memory.readable_keys(namespace)).result(60)
    return {hash_of(key) for key in keys}


def test_a_follower_of_a_real_server_has_its_picture(followed: Server, context: zmq.Context):
    """Puts, evictions, replacements and clears of two namespaces: 10,000 blocks."""
    assert followed.feed is not None
    follower = Follower(context, *followed.feed.endpoints)
    peer = Peer(context, followed.endpoint)
    for name in ("one@1", "two@2"):
        peer.hello(namespace=name, block_bytes=BLOCK_BYTES)
    random = Random(5)
    for turn in range(334):
        name = random.choice(["one@1", "two@2"])
        if random.random() < 0.02:
            peer.ask(Clear(request_id=peer.next_id(), namespace=name))
        numbers = {APART * random.randrange(8000) for _ in range(30)}
        peer.put([*numbers], namespace=name, force=random.random() < 0.3)
        if turn % 50 == 49:
            picture = followed_to_the_end(followed, follower)
            topics = {topic.rpartition(b"@")[2]: here for topic, here in picture.blocks.items()}
            assert topics.get(b"one:1", set()) == truth_of(followed, "one@1")
            assert topics.get(b"two:2", set()) == truth_of(followed, "two@2")
    assert followed.store.memory.counters()["evicted"]


def test_a_server_that_starts_again_is_known_to_be_empty(context: zmq.Context):
    port = two_free_ports()
    events = f"tcp://127.0.0.1:{port}"
    follower = Follower(context, events, f"tcp://127.0.0.1:{port + 1}")
    for numbers in ([APART, 3 * APART], [2 * APART]):
        with memory_server(events=events, name="s") as server:
            peer = Peer(context, server.endpoint)
            peer.hello(namespace="ns", block_bytes=BLOCK_BYTES)
            peer.put(numbers, namespace="ns")
            picture = followed_to_the_end(server, follower)
            assert picture.blocks == {b"kv@s@ns": truth_of(server, "ns")}


def two_free_ports() -> int:
    """The first of two ports, one above the other, below those that the kernel gives away."""
    for _ in range(100):
        port = SystemRandom().randrange(20_000, 32_000, 2)
        with (
            suppress(OSError),
            socket.create_server(("127.0.0.1", port)),
            socket.create_server(("127.0.0.1", port + 1)),
        ):
            return port
    raise AssertionError("no two ports are free beside each other")


def test_without_the_setting_nothing_is_watched(server: Server):
    assert server.feed is None
    assert server.store.presence is not None and not server.store.presence.is_read


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"events": "5759"}, "events: .*missing"),
        ({"events": "tcp://*:5759"}, "events: .* neither encrypted"),
        (
            {"events": "tcp://*:5759", "keys": "k", "tenants": "t", "insecure": True},
            "events show the keys of all tenants",
        ),
    ],
)
def test_an_address_that_shows_more_than_it_may_is_refused(wrong: dict[str, str], words: str):
    with pytest.raises(ConfigError, match=words):
        ServerConfig(**wrong)


def test_an_address_that_is_taken_is_named():
    with memory_server(**EVENTS) as first:
        assert first.feed is not None
        taken = Server(ServerConfig(bind="tcp://127.0.0.1:*", events=first.feed.endpoints[0]))
        with pytest.raises(ConfigError, match=r"events: .*in use"):
            taken.start()
