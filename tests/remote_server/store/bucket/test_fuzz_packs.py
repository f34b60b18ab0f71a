"""A bucket with packs whose headers have wild fields and the right checksum: each row comes as it
was stored or not at all, and no error but that of its pack."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import zmq
from bucket_helpers import RealBucket, bucket_server, folder_url
from hypothesis import given
from hypothesis import strategies as st
from wild_packs import (
    BLOCK_BYTES,
    NAMESPACE,
    ROWS,
    data_of,
    programs,
    wild_pack,
)
from wire_peer import Peer, key

from remote_server.protocol import Stretch
from remote_server.store.bucket.packs import layout
from remote_server.store.bucket.packs.grouping import packs_in
from remote_server.store.bucket.packs.object_names import object_name
from remote_server.store.bucket.packs.pack import PackState, make_pack
from remote_server.store.bucket.tier import BucketSettings
from remote_server.store.bucket.transfers.pack_io import Largest

pytestmark = pytest.mark.real_time

pytest_plugins = ["fuzzing"]

TOKENS = 1024 // ROWS
CHAIN = [Stretch(ROWS, 0, 0, TOKENS)]
KEYS = [key(number) for number in range(ROWS)]
STRAYS = [key(number) for number in range(ROWS, ROWS + 3)]


@given(programs, st.booleans())
def decode(program: Any, compress: bool) -> None:
    data = wild_pack(KEYS, STRAYS, program, compress=compress)
    try:
        num_bytes = layout.header_bytes_of(data)
        header = layout.decode_header(data, NAMESPACE, KEYS[-1])
    except (layout.PackDamaged, layout.PackForeign):
        assert program, "an honest pack is refused"
        return
    assert layout.decode_header(layout.encode_header(header), NAMESPACE, KEYS[-1]) == header
    pack = make_pack(header, 0.0, PackState.READABLE, data)
    places = [(row.offset, row.offset + row.stored) for row in pack.rows]
    assert places[0][0] == num_bytes
    assert all(before[1] <= after[0] for before, after in pairwise(places))
    assert all(0 <= row.stored <= row.length <= pack.block_bytes < 1 << 32 for row in pack.rows)
    assert pack.seal == layout.seal_of(data)


def test_a_header_with_any_fields_is_one_that_this_server_could_have_written_or_refused(
    fuzz: Any,
) -> None:
    fuzz.run(decode, examples=200)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[RealBucket]:
    monkeypatch.setattr("remote_server.store.bucket.ends.log.warning", lambda *_: None)
    with RealBucket(settings=BucketSettings(Largest(BLOCK_BYTES, 8 * BLOCK_BYTES))) as bucket:
        yield bucket


def test_each_row_of_a_wild_pack_comes_as_it_was_stored_or_not_at_all(
    fuzz: Any, bucket: RealBucket, internal_errors: list[object]
) -> None:
    number = 0

    @given(programs, st.booleans())
    def look_and_read(program: Any, compress: bool) -> None:
        nonlocal number
        keys = [key(number + place) for place in range(ROWS)]
        strays = [key(max(0, number - 1)), key(1 << 40)]
        number += ROWS
        data = wild_pack(keys, strays, program, compress=compress)
        name = object_name("", NAMESPACE, keys[-1])
        bucket.objects.put(name, memoryview(data), create=False)
        bucket.tier.expect(NAMESPACE, [*packs_in(keys, CHAIN, BLOCK_BYTES, 8 * BLOCK_BYTES)])
        bucket.drain()
        for _ in range(2):  # of a pack that was damaged the second read has nothing
            for each, data in zip(
                [*keys, *strays], bucket.read(NAMESPACE, [*keys, *strays]), strict=True
            ):
                assert data in (None, data_of(each, True), data_of(each, False))
        if not program:
            assert bucket.read(NAMESPACE, keys) == [data_of(each, compress) for each in keys]
        bucket.objects.remove([name])
        bucket.tier.check()
        assert not internal_errors

    fuzz.run(look_and_read, examples=60)


HEADERS = ("read", "absent", "damaged", "version", "codec", "too_large")


def test_a_server_above_wild_packs_sends_each_row_as_it_was_stored_or_not_at_all(
    fuzz: Any, context: zmq.Context, tmp_path: Path, internal_errors: list[object]
) -> None:
    url = folder_url(tmp_path)
    number = 0

    def headers(counters: Mapping[str, int]) -> int:
        """Those that were read, with whatever result."""
        return sum(counters[f"bucket_headers_{result}"] for result in HEADERS)

    with bucket_server(url, pack=64 << 10) as server:
        peer = Peer(context, server.endpoint)
        peer.hello(block_bytes=BLOCK_BYTES)

        @given(programs, st.booleans())
        def look_and_get(program: Any, compress: bool) -> None:
            nonlocal number
            numbers = range(number, number + ROWS)
            keys = [key(each) for each in numbers]
            number += ROWS
            path = Path(url.removeprefix("file://"), object_name("", NAMESPACE, keys[-1]))
            path.parent.mkdir(parents=True, exist_ok=True)
            data = wild_pack(keys, [key(max(0, number - 9))], program, compress=compress)
            path.write_bytes(data)
            before = headers(peer.stats().counters)
            peer.lookup(numbers, chain=CHAIN)
            peer.stats_once(lambda stats: headers(stats.counters) > before)
            _, arrived = peer.get(numbers)
            for place, row in arrived:
                assert row in (data_of(keys[place], True), data_of(keys[place], False))
            assert program or len(arrived) == ROWS, "an honest pack is not found"
            path.unlink(missing_ok=True)
            assert not internal_errors

        fuzz.run(look_and_get, examples=15)
    server.store.tier_stack.check()
    assert server.store.counters["refused_internal"] == 0
