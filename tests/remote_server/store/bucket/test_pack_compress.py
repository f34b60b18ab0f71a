"""Packs whose rows are compressed: they come back, they are shared, and damage is a miss."""

import random
import tracemalloc

import msgspec
import pytest
from bucket_helpers import ROW_BYTES, FaultyObjects, RealBucket, folder_url
from hypothesis import given, settings
from hypothesis import strategies as st
from test_bucket_faults import KEYS, NAME, ROWS, look, read
from test_bucket_faults import write as write_all
from wire_peer import key

from remote_server.errors import ConfigError
from remote_server.protocol import KeyState
from remote_server.server.config import ServerConfig
from remote_server.store.bucket.packs import codecs, layout
from remote_server.store.bucket.packs.codecs import NONE, ZSTD, CodecError
from remote_server.store.bucket.tier import BucketSettings
from remote_server.store.pages import PAGE

zstandard = pytest.importorskip("zstandard")


def numbers(seed: int, num_bytes: int = ROW_BYTES) -> bytes:
    """Numbers of 16 bits: noise in the low byte, few values in the high one."""
    pick = random.Random(seed)
    data = bytearray(pick.randbytes(num_bytes))
    data[1::2] = bytes(pick.choices(b"\x3e\x3f\xbe\xbf", k=len(data[1::2])))
    return bytes(data)


DATA = [numbers(seed) for seed in range(ROWS - 1)] + [random.Random(9).randbytes(ROW_BYTES)]
"""The last row is noise, which no codec makes shorter."""


@pytest.fixture
def objects(tmp_path):
    return FaultyObjects(folder_url(tmp_path))


def write(objects: FaultyObjects, compress: str, data: list[bytes] = DATA) -> dict[str, int]:
    """A server writes all rows. Returns its counters."""
    with RealBucket(objects=objects, settings=BucketSettings(compress=compress)) as bucket:
        assert set(write_all(bucket, data)) == {"ok"}
        assert read(bucket) == data, "the writer knows the places of its rows"
        return bucket.tier.counters()


def header_of(objects: FaultyObjects) -> layout.PackHeader:
    return layout.decode_header(objects.bytes_of(NAME), "ns", KEYS[-1])


def rewrite(objects: FaultyObjects, **changes: object) -> None:
    """Another header before the same rows, with a checksum that is right, in an object that is as
    long as the header has it."""
    data = objects.bytes_of(NAME)
    header = msgspec.structs.replace(header_of(objects), **changes)
    encoded = layout.encode_header(header)
    data = encoded + data[layout.header_bytes_of(data) :]
    *_, last = layout.offsets_of(header, len(encoded))
    num_bytes = last + header.stored_lengths[-1]
    data = data[:num_bytes].ljust(num_bytes, b"\0")
    objects.put(NAME, memoryview(data), create=False)


def test_a_server_without_the_option_reads_what_one_with_it_wrote_and_the_other_way(objects):
    counters = write(objects, ZSTD)
    plain, stored = ROWS * ROW_BYTES, len(objects.bytes_of(NAME))
    assert counters["written_plain_bytes"] == plain
    assert counters["written_bytes"] == stored < 0.8 * plain
    with RealBucket(objects=objects, settings=BucketSettings(compress=NONE)) as bucket:
        look(bucket)
        assert look(bucket) == bytes([KeyState.READABLE]) * ROWS
        assert read(bucket) == DATA
        assert bucket.tier.counters()["read_bytes"] == stored - PAGE, "all but the header"
    objects.remove([NAME])
    write(objects, NONE)
    with RealBucket(objects=objects, settings=BucketSettings(compress=ZSTD)) as bucket:
        look(bucket)
        look(bucket)
        assert read(bucket) == DATA


def test_a_row_that_does_not_become_shorter_is_stored_as_it_is(objects):
    write(objects, ZSTD)
    lengths = header_of(objects).stored_lengths
    assert lengths[-1] == ROW_BYTES and max(lengths[:-1]) < ROW_BYTES - PAGE


def test_a_pack_of_noise_is_a_plain_pack_that_every_version_reads(objects):
    noise = [random.Random(seed).randbytes(ROW_BYTES) for seed in range(ROWS)]
    write(objects, ZSTD, noise)
    compressed = objects.bytes_of(NAME)
    objects.remove([NAME])
    write(objects, NONE, noise)
    assert objects.bytes_of(NAME) == compressed


def test_rows_without_bytes_and_of_odd_lengths_come_back(objects):
    data = [numbers(seed, num_bytes) for seed, num_bytes in enumerate((0, 1, 9, 4097, 60_001))]
    write(objects, ZSTD, [*data, *DATA[:3]])


def test_a_server_without_the_library_takes_the_pack_for_absent_and_keeps_it(objects, monkeypatch):
    write(objects, ZSTD)
    data = objects.bytes_of(NAME)

    def missing() -> None:
        raise ImportError("no zstandard")

    monkeypatch.setitem(codecs._CODECS, ZSTD, missing)
    with RealBucket(objects=objects) as bucket:
        look(bucket)
        assert not any(look(bucket))
        counters = bucket.tier.counters()
    assert (counters["headers_codec"], counters["headers_damaged"]) == (1, 0)
    assert objects.bytes_of(NAME) == data
    with pytest.raises(ConfigError, match=r"pip install '\.\[bucket\]'"):
        ServerConfig(pack_compress=ZSTD)


@pytest.mark.parametrize("changes", [{"codec": "later"}, {"element_bytes": 4}])
def test_a_pack_of_an_unknown_codec_is_absent_and_stays(objects, changes):
    write(objects, ZSTD)
    rewrite(objects, **changes)
    with RealBucket(objects=objects) as bucket:
        look(bucket)
        assert not any(look(bucket))
        assert bucket.tier.counters()["headers_codec"] == 1
    assert NAME in [one.name for chunk in objects.listing("") for one in chunk]


@pytest.mark.parametrize("place", [0, 6, 7])
def test_a_flipped_bit_of_a_compressed_row_costs_that_row(objects, place):
    write(objects, ZSTD)
    with RealBucket(objects=objects) as bucket:
        look(bucket)
        row = bucket.tier.peek("ns", KEYS[place])
        objects.flip(NAME, row.offset + row.stored // 2)
        got = read(bucket)
        assert got[place] is None
        assert [each for n, each in enumerate(got) if n != place] == [
            each for n, each in enumerate(DATA) if n != place
        ]
        assert bucket.tier.counters()["read_damaged"] == 1


def test_rows_are_misses_and_not_damaged_where_memory_is_short_and_come_later(objects, monkeypatch):
    write(objects, ZSTD)

    def has_no_memory(*_: object) -> None:
        raise MemoryError

    with RealBucket(objects=objects) as bucket:
        look(bucket)
        with monkeypatch.context() as patch:
            patch.setattr(codecs.Zstd, "decompress", has_no_memory)
            assert read(bucket) == [None] * ROWS
        counters = bucket.tier.counters()
        assert (counters["read_failed"], counters["read_damaged"]) == (ROWS, 0)
        look(bucket)
        look(bucket)
        assert read(bucket) == DATA


def test_a_header_that_gives_a_row_another_length_costs_that_row(objects):
    write(objects, ZSTD)
    header = header_of(objects)
    rows = [msgspec.structs.replace(header.rows[0], length=ROW_BYTES - 1), *header.rows[1:]]
    rewrite(objects, rows=rows)
    with RealBucket(objects=objects) as bucket:
        look(bucket)
        look(bucket)
        assert read(bucket)[0] is None
        assert bucket.tier.counters()["read_damaged"] == 1


@pytest.mark.parametrize("changes", [
    {"stored": [ROW_BYTES + 1] * ROWS}, {"stored": [0] * ROWS}, {"stored": [1]},
    {"block_bytes": ROW_BYTES - 1},
])  # fmt: skip
def test_a_header_with_impossible_lengths_is_damaged(objects, changes):
    write(objects, ZSTD)
    rewrite(objects, **changes)
    with RealBucket(objects=objects) as bucket:
        look(bucket)
        assert not any(look(bucket))
        assert bucket.tier.counters()["headers_damaged"] == 1


@pytest.mark.parametrize("content_size", [True, False])
def test_a_bomb_is_refused_without_its_memory(content_size):
    """64 MiB of zeros in a row of 64 KiB, with its length in the frame and without."""
    params = zstandard.ZstdCompressionParameters(write_content_size=content_size, window_log=26)
    bomb = zstandard.ZstdCompressor(compression_params=params).compress(bytes(64 << 20))
    data = memoryview(len(bomb).to_bytes(4, "little") + bomb)
    row = memoryview(bytearray(ROW_BYTES))
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            codecs.Zstd().decompress(data, row, 1)
        assert tracemalloc.get_traced_memory()[1] < 2 * ROW_BYTES
    finally:
        tracemalloc.stop()


GOOD = codecs.Zstd().compress(memoryview(DATA[0]), 2)


@settings(max_examples=25, deadline=None)
@given(place=st.integers(0, len(GOOD) - 1), bit=st.integers(0, 7), cut=st.integers(0, len(GOOD)))
def test_damage_raises_one_error_or_gives_other_bytes_of_the_same_length(place, bit, cut):
    data = bytearray(GOOD)
    data[place] ^= 1 << bit
    row = bytearray(ROW_BYTES)
    for damaged in (data, GOOD[:cut], bytes(data[:cut])):
        try:
            codecs.Zstd().decompress(memoryview(damaged), memoryview(row), 2)
        except CodecError:
            continue
        assert len(row) == ROW_BYTES


@settings(max_examples=40, deadline=None)
@given(data=st.binary(min_size=1, max_size=300), size=st.sampled_from(codecs.ELEMENT_BYTES))
def test_what_is_compressed_comes_back(data, size):
    row = bytearray(len(data))
    compressed = codecs.Zstd().compress(memoryview(data), size)
    codecs.Zstd().decompress(memoryview(compressed), memoryview(row), size)
    assert row == data


def test_a_plane_of_noise_is_kept_as_it_is_and_the_other_one_is_compressed():
    data = numbers(5)
    compressed = codecs.Zstd().compress(memoryview(data), 2)
    assert compressed[4 : 4 + ROW_BYTES // 2] == data[::2]
    assert len(compressed) < 0.7 * ROW_BYTES, "two bits of eight, and eight of eight"


@pytest.mark.parametrize("extra", [b"", b"\1", bytes(4), b"\xff" * 4])
def test_bytes_behind_the_last_plane_or_missing_ones_are_damage(extra):
    good = codecs.Zstd().compress(memoryview(DATA[0]), 2)
    damaged = good + extra if extra else good[:3]
    with pytest.raises(CodecError):
        codecs.Zstd().decompress(memoryview(damaged), memoryview(bytearray(ROW_BYTES)), 2)


def test_the_size_of_numbers_is_found_in_a_sample():
    zstd = codecs.Zstd()
    assert codecs.element_bytes_of(zstd, memoryview(numbers(1))) == 2
    noise = random.Random(3)
    fp8 = bytes(noise.choices(range(256), weights=[1 + (n & 7) ** 3 for n in range(256)], k=65_536))
    assert codecs.element_bytes_of(zstd, memoryview(fp8)) == 1


def test_the_formats_seal_their_numbers():
    header = layout.PackHeader("ns", 4096, [layout.RowHeader(key(1), 4096, 1, 0, 0)])
    compressed = msgspec.structs.replace(header, codec=ZSTD, stored=[100])
    for each in (header, compressed):
        encoded = bytearray(layout.encode_header(each))
        assert layout.decode_header(encoded, "ns", key(1)) == each
        encoded[len(layout.MAGIC)] ^= layout.PLAIN ^ layout.COMPRESSED
        with pytest.raises(layout.PackDamaged):
            layout.decode_header(encoded, "ns", key(1))


def test_a_wrong_name_of_a_codec_is_refused():
    with pytest.raises(ConfigError, match="pack_compress: 'brotli' is none of none, zstd"):
        ServerConfig(pack_compress="brotli")
