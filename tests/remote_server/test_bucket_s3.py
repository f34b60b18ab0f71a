"""The bucket tier on a real dialect of S3, with its errors and its silence."""

import signal
import time

import pytest
from bucket_helpers import ROW_BYTES, RealBucket, bucket_server, chain_of, hello
from busy_host import within
from s3 import s3_server
from test_bucket import PACKED, ROWS, fill, read
from test_bucket_faults import DATA, look, write
from test_bucket_faults import read as read_rows
from wire_peer import Peer, block

from remote_server.protocol import KeyState
from remote_server.store.bucket.objects import BucketError, Failure, Objects


@pytest.fixture(scope="module")
def s3():
    with s3_server() as server:
        yield server


@pytest.fixture
def environment(s3, monkeypatch):
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def url(s3, environment, request):
    """A bucket of this test alone."""
    return f"{s3.url}/{request.node.name}"


def test_what_one_tier_writes_another_reads(url):
    with RealBucket(url) as first:
        assert set(write(first)) == {"ok"}
        assert len(first.names()) == 1
    with RealBucket(url) as second:
        assert not any(look(second)), "no lookup waits for the bucket"
        assert look(second) == bytes([KeyState.READABLE]) * len(DATA)
        assert read_rows(second) == DATA
        second.tier.clear("ns")
        second.drain()
        assert second.names() == []


def test_a_second_server_finds_the_packs_of_the_first(url, context):
    with bucket_server(url) as first:
        fill(peer := hello(Peer(context, first.endpoint)))
        peer.stats_once(lambda s: s.counters["bucket_packs_written"] == 2)
    with bucket_server(url) as second:
        peer = hello(Peer(context, second.endpoint))
        peer.stats_once(lambda s: s.counters["bucket_names"] == 2)
        peer.lookup(range(ROWS), chain=chain_of(ROWS))
        peer.stats_once(lambda s: s.counters["bucket_headers_read"] == 2)
        assert read(peer, range(PACKED)) == [block(n, ROW_BYTES) for n in range(PACKED)]


def test_an_object_that_is_there_is_not_written_again(url):
    objects = Objects(url)
    assert objects.put("a", memoryview(b"first"))
    assert not objects.put("a", memoryview(b"second"))
    assert bytes(objects.read("a", 0, 5)) == b"first"
    assert objects.size_of("b") is None
    objects.remove(["a", "b"])
    assert objects.size_of("a") is None


@pytest.mark.parametrize(
    ("begin", "end", "failure"), [(0, 50, Failure.SHORT), (3, 9, Failure.SHORT)]
)
def test_bytes_past_the_end_are_a_short_read(url, begin, end, failure):
    objects = Objects(url)
    objects.put("a", memoryview(b"12345"))
    with pytest.raises(BucketError) as caught:
        objects.read("a", begin, end)
    assert caught.value.failure is failure


def test_a_missing_bucket_is_named_and_the_server_serves_without_it(environment, context, caplog):
    with bucket_server("s3://missing-bucket/kv") as server:
        fill(peer := hello(Peer(context, server.endpoint)))
        assert peer.lookup(range(ROWS), chain=chain_of(ROWS)).prefix == ROWS
        peer.stats_once(lambda s: s.counters["bucket_names"] == 0)
        deadline = time.monotonic() + 20
        while "cannot be listed" not in caplog.text:
            assert time.monotonic() < deadline, caplog.text
            time.sleep(0.01)
    assert "NoSuchBucket" in caplog.text


@pytest.fixture
def writing(context, monkeypatch):
    """A peer of a server that has written to a store of its own, and that store."""
    with s3_server() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        with bucket_server(store.url) as server:
            fill(peer := hello(Peer(context, server.endpoint)))
            peer.stats_once(lambda s: s.counters["bucket_packs_written"] == 2)
            yield peer, store


def test_a_frozen_store_costs_its_own_calls_and_no_lookup(writing):
    peer, store = writing
    store.process.send_signal(signal.SIGSTOP)
    try:
        _lookups_are_quick(peer)
        peer.stats_once(lambda s: s.counters["bucket_failed_timeout"] > 0)
    finally:
        store.process.send_signal(signal.SIGCONT)


def test_a_killed_store_is_left_alone(writing):
    peer, store = writing
    store.process.kill()
    _lookups_are_quick(peer)
    peer.stats_once(lambda s: s.counters["bucket_pauses"] > 0)


def _lookups_are_quick(peer: Peer) -> None:
    """Of new prompts, whose packs the server does not know: a call of the store takes two
    seconds."""
    prompts = iter(range(1000, 1_000_000, 1000))

    def look() -> float:
        first, began = next(prompts), time.monotonic()
        assert not any(peer.lookup(range(first, first + ROWS), chain=chain_of(ROWS)).states)
        return time.monotonic() - began

    for _ in range(20):
        within(1.0, look)
