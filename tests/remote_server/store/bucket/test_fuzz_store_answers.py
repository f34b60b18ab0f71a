"""A bucket over a store whose answers are wild: every call ends, by a result or by an error of the
bucket, and each row comes as it was stored or not at all."""

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import pytest
from bucket_helpers import RealBucket
from client_helpers import Clock
from hypothesis import given
from hypothesis import strategies as st
from wild_packs import BLOCK_BYTES, LENGTH, NAMESPACE, ROWS, data_of, wild_pack
from wild_store import WildStore, programs, wild_store
from wire_peer import key

from remote_server import protocol
from remote_server.protocol import Stretch
from remote_server.store.bucket.objects import process_objects
from remote_server.store.bucket.objects.objects import BucketError
from remote_server.store.bucket.objects.process_objects import ProcessObjects
from remote_server.store.bucket.opening import _list_all
from remote_server.store.bucket.packs.grouping import packs_in
from remote_server.store.bucket.packs.object_names import object_name, tenant_prefix
from remote_server.store.bucket.tier import BucketSettings
from remote_server.store.bucket.transfers.pack_io import Largest
from remote_server.store.bucket.upkeep import survey
from remote_server.store.bucket.upkeep.sweep import Limits, sweep
from remote_server.store.tier import Offered

pytest_plugins = ["fuzzing"]
pytestmark = pytest.mark.real_time

PACK_BYTES = ROWS * BLOCK_BYTES
CHAIN = [Stretch(ROWS, 0, 0, 1024 // ROWS)]
THERE = [key(number) for number in range(ROWS)]
NEW = [key(number) for number in range(ROWS, 2 * ROWS)]
PREFIX = tenant_prefix("")


class Scene:
    """The store and the process of its client; a fresh tier for each example."""

    def __init__(self, store: WildStore) -> None:
        self.store = store
        self.clock = Clock()
        self.objects = ProcessObjects("s3://blocks/kv", 4, self.clock)

    def begin(self) -> None:
        """The store has one pack, and may be called."""
        self.store.end()
        data = wild_pack(THERE, [], [], compress=False)
        self.store.objects = {f"kv/{object_name('', NAMESPACE, THERE[-1])}": data}
        self.clock.now += process_objects.LONGEST_PAUSE_S

    def tier(self) -> RealBucket:
        return RealBucket(
            objects=self.objects, settings=BucketSettings(Largest(BLOCK_BYTES, PACK_BYTES))
        )


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    for module in ("ends", "objects.process_objects", "objects.client", "objects.availability"):
        for level in ("warning", "error"):
            monkeypatch.setattr(f"remote_server.store.bucket.{module}.log.{level}", lambda *_: None)
    with wild_store() as (store, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        scene = Scene(store)
        with closing(scene.objects):
            yield scene


def look(bucket: RealBucket, keys: list[bytes]) -> None:
    bucket.tier.expect(NAMESPACE, [*packs_in(keys, CHAIN, BLOCK_BYTES, PACK_BYTES)])
    bucket.drain()


def read(bucket: RealBucket, keys: list[bytes]) -> int:
    """How many rows come, each as it was stored."""
    came = bucket.read(NAMESPACE, keys)
    for each, data in zip(keys, came, strict=True):
        assert data is None or data == data_of(each, False)
    return len(came) - came.count(None)


def put(bucket: RealBucket) -> None:
    data = [data_of(each, False) for each in NEW]
    lengths = [LENGTH] * ROWS
    sums = protocol.checksums(NAMESPACE, NEW, data)
    rows = bucket.tier.begin_puts(Offered(NAMESPACE, NEW, lengths, sums, CHAIN), BLOCK_BYTES)
    if rows:
        results: list[Any] = []
        bucket.tier.write(rows, [memoryview(each) for each in data], results.extend)
        bucket.drain()
        assert len(results) == len(rows)


def list_and_sweep(bucket: RealBucket) -> None:
    listing = _list_all(bucket.objects, PREFIX)
    bucket.tier.listed(listing.names, listing.now)
    bucket.tier.swept(sweep(bucket.objects, PREFIX, range(256), Limits(num_bytes=1 << 40)))


def remove(bucket: RealBucket) -> None:
    row = bucket.tier.peek(NAMESPACE, THERE[0])
    if row is not None:
        bucket.tier.remove(row)


def check_all(bucket: RealBucket) -> None:
    with suppress(BucketError):
        for pack in survey.packs(bucket.objects, ""):
            survey.check(bucket.objects, pack)
        survey.namespaces(bucket.objects, "")


ACTS: dict[str, Callable[[RealBucket], object]] = {
    "look": lambda bucket: look(bucket, THERE),
    "read": lambda bucket: read(bucket, THERE),
    "look at new": lambda bucket: look(bucket, NEW),
    "read new": lambda bucket: read(bucket, NEW),
    "put": put,
    "list": list_and_sweep,
    "check": check_all,
    "remove": remove,
    "clear": lambda bucket: bucket.tier.clear(NAMESPACE),
}
usual = st.sampled_from([["read"], ["look", "read"], ["put", "look at new", "read new"]])
acts = usual | st.lists(st.sampled_from([*ACTS]), min_size=1, max_size=4)


def test_every_call_of_a_store_with_wild_answers_ends_and_no_wrong_row_comes(
    fuzz: Any, scene: Scene, internal_errors: list[object]
) -> None:
    @given(programs, acts, st.booleans())
    def call(program: Any, names: list[str], is_known: bool) -> None:
        scene.begin()
        with scene.tier() as bucket:
            if is_known:
                look(bucket, THERE)
            scene.store.begin(program)
            for name in names:
                ACTS[name](bucket)
                bucket.drain()
            scene.store.end()
            read(bucket, THERE + NEW)
        scene.begin()
        with scene.tier() as bucket:
            look(bucket, THERE)
            assert read(bucket, THERE) == ROWS, "the store is honest again"
        assert not internal_errors

    fuzz.run(call, examples=10)
