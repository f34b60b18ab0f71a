"""The bucket tier on real dialects of S3 and of Azure, with their errors and their silence."""

import uuid
from functools import partial

import pytest
from azurite import azure_server
from bucket_helpers import RealBucket, bucket_server, chain_of, hello
from fake_server import eventually
from http_faults import Damage, StoreFaults
from s3 import s3_server
from store_proxy import StoreProxy
from test_bucket import ROWS, fill
from test_bucket_faults import DATA, look, write
from test_bucket_faults import read as read_rows
from wire_peer import Peer

from remote_server.protocol import KeyState
from remote_server.store.bucket.objects.client import StoreObjects
from remote_server.store.bucket.objects.objects import BucketError, Failure, Objects
from remote_server.store.bucket.objects.process_objects import ProcessObjects

pytestmark = pytest.mark.real_time


@pytest.fixture(scope="module", params=[s3_server, azure_server], ids=["s3", "azure"])
def store(request):
    with request.param() as server:
        yield server


@pytest.fixture
def environment(store, monkeypatch):
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def url(store, environment):
    """A bucket of this test alone."""
    return f"{store.url}/{uuid.uuid4().hex}"


@pytest.fixture(params=[StoreObjects, partial(ProcessObjects, num_channels=2)], ids=["own", "far"])
def opened(request):
    """A way to call a store: in this process, or in one of its own."""
    every: list[Objects] = []

    def opened(url: str) -> Objects:
        every.append(request.param(url))
        return every[-1]

    yield opened
    for each in every:
        each.close()


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


def test_an_object_that_is_there_is_not_written_again(opened, url):
    objects = opened(url)
    assert objects.put("a", memoryview(b"first"))
    assert not objects.put("a", memoryview(b"second"))
    assert bytes(objects.read("a", 0, 5)) == b"first"
    assert objects.size_of("b") is None
    objects.remove(["a", "b"])
    assert objects.size_of("a") is None


@pytest.mark.parametrize(("begin", "end"), [(0, 50), (3, 9), (30, 90)])
def test_bytes_past_the_end_are_a_short_read(opened, url, begin, end):
    objects = opened(url)
    objects.put("a", memoryview(b"12345"))
    with pytest.raises(BucketError) as caught:
        objects.read("a", begin, end)
    assert caught.value.failure is Failure.SHORT


def test_a_missing_bucket_is_named_and_the_server_serves_without_it(
    store, environment, context, caplog
):
    scheme, code = store.url.partition("://")[0], MISSING[store.url[:2]]
    with bucket_server(f"{scheme}://missing-bucket/kv") as server:
        fill(peer := hello(Peer(context, server.endpoint)))
        assert peer.lookup(range(ROWS), chain=chain_of(ROWS)).prefix == ROWS
        peer.stats_once(lambda s: s.counters["bucket_names"] == 0)
        eventually(lambda: "cannot be listed" in caplog.text)
    assert code in caplog.text


MISSING = {"s3": "NoSuchBucket", "az": "ContainerNotFound"}


def test_a_put_into_a_missing_bucket_is_no_absent_object(opened, store, environment):
    """It fails for the next object as well."""
    objects = opened(f"{store.url.partition('://')[0]}://missing-bucket/kv")
    for call in (lambda: objects.put("a", memoryview(b"1")), lambda: [*objects.listing("")]):
        with pytest.raises(BucketError) as caught:
            call()
        assert caught.value.failure is Failure.OTHER


REASONS = {
    Failure.UNREACHABLE: [StoreFaults(refuse=True), StoreFaults(damage=Damage.CUT)],
    Failure.THROTTLED: [StoreFaults(status=503, code="SlowDown"), StoreFaults(status=429)],
    Failure.FORBIDDEN: [
        StoreFaults(status=403, code="AccessDenied"), StoreFaults(status=400, code="ExpiredToken"),
        StoreFaults(status=403, code="InvalidAccessKeyId"),
    ],
    Failure.ABSENT: [
        StoreFaults(status=404, code="NoSuchKey"), StoreFaults(status=404, code="NoSuchBucket"),
    ],
    Failure.SHORT: [StoreFaults(damage=Damage.SHORT), StoreFaults(status=416)],
    Failure.OTHER: [StoreFaults(status=500), StoreFaults(status=409), StoreFaults(status=412)],
}  # fmt: skip


@pytest.fixture
def proxy(store):
    with StoreProxy(store.address) as proxy:
        yield proxy


@pytest.fixture
def proxied(store, url, proxy, monkeypatch):
    """The bucket of this test, behind `proxy`."""
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value.replace(store.address, proxy.address))
    return url


@pytest.fixture
def objects(opened, proxied):
    return opened(proxied)


def test_every_failure_of_a_read_has_its_own_reason_and_the_words_of_the_store(objects, proxy):
    objects.put("a", memoryview(bytes(100_000)))
    for reason, faults in REASONS.items():
        for fault in faults:
            proxy.set(fault)
            with pytest.raises(BucketError) as caught:
                objects.read("a", 4096, 90_000)
            assert caught.value.failure is reason, f"{fault}: {caught.value}"
            assert str(caught.value) == f"{fault.code}: of the test" or not fault.code
    proxy.clear()
    assert objects.read("a", 4096, 90_000) == bytes(90_000 - 4096)


def test_a_conflict_is_an_object_that_is_there_only_where_it_is(objects, proxy):
    """Azure answers 409 also where an account is full; obstore has one error for both."""
    objects.put("a", memoryview(b"first"))
    proxy.set(StoreFaults(status=409, code="AccountIsFull", only="^PUT"))
    assert not objects.put("a", memoryview(b"second"))
    with pytest.raises(BucketError) as caught:
        objects.put("b", memoryview(b"first"))
    assert caught.value.failure is Failure.OTHER
    with pytest.raises(BucketError):
        objects.put("a", memoryview(b"second"), create=False)


def test_a_frozen_store_costs_its_own_calls(proxied, proxy, context):
    with bucket_server(proxied) as server:
        fill(peer := hello(Peer(context, server.endpoint)))
        peer.stats_once(lambda s: s.counters["bucket_packs_written"] == 2)
        proxy.set(StoreFaults(hold=True))
        for first in range(1000, 21_000, 1000):  # new prompts, whose packs it does not know
            assert not any(peer.lookup(range(first, first + ROWS), chain=chain_of(ROWS)).states)
        peer.stats_once(lambda s: s.counters["bucket_failed_timeout"] > 0)
        proxy.clear()
