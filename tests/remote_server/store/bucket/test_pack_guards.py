"""Guards of the bucket: which pack a name may have, which rows a pack, and which pack leaves."""

from pathlib import Path

import pytest
from bucket_helpers import FaultyObjects, RealBucket, folder_url
from mutations import Step
from wild_packs import ROWS, VALUES, wild_pack
from wire_peer import key

from remote_server.protocol import Stretch
from remote_server.store.bucket.objects.client import StoreObjects
from remote_server.store.bucket.objects.objects import Listed
from remote_server.store.bucket.packs import layout
from remote_server.store.bucket.packs.object_names import PARTITIONS, object_name
from remote_server.store.bucket.transfers.pack_io import Largest, read_header
from remote_server.store.bucket.upkeep.survey import Checked, PackObject, check
from remote_server.store.bucket.upkeep.sweep import Limits, sweep
from remote_server.store.chains import Group, joined


def test_a_header_counts_only_under_its_namespace_and_its_last_key():
    rows = [layout.RowHeader(key(n), 4096, n, n << 32, 1) for n in range(2)]
    encoded = layout.encode_header(layout.PackHeader("ns", 4096, rows))
    assert layout.decode_header(encoded, "ns", key(1)).rows == rows
    for namespace, last in (("other", key(1)), ("ns", key(0))):
        with pytest.raises(layout.PackDamaged, match="not the pack of its name"):
            layout.decode_header(encoded, namespace, last)


ROW = layout.RowHeader(key(0), 4096, 1, 0, 0)
OTHER = layout.RowHeader(key(1), 4096, 2, 0, 0)
LONGER = layout.RowHeader(key(1), 4097, 2, 0, 0)


@pytest.mark.parametrize("rows", [[OTHER, OTHER], [OTHER, ROW, OTHER], [ROW, LONGER]])
def test_a_header_whose_rows_cannot_be_so_is_damaged(rows: list[layout.RowHeader]):
    encoded = layout.encode_header(layout.PackHeader("ns", 4096, rows))
    with pytest.raises(layout.PackDamaged, match=r"a key twice|longer than a block"):
        layout.decode_header(encoded, "ns", key(1))


@pytest.mark.parametrize(
    ("header", "body", "read"),
    [
        (layout.PackHeader("ns", 4096, [ROW, OTHER]), 2 * 4096, ("", "")),
        (layout.PackHeader("ns", 4096, [ROW, OTHER]), 4096, ("damage", "not those of its rows")),
        (layout.PackHeader("ns", 4096, [ROW, OTHER]), 3 * 4096, ("damage", "not those of its")),
        (layout.PackHeader("ns", 8192, [OTHER]), 4096, ("foreign", "headers_too_large")),
        (layout.PackHeader("ns", 4096, [
            layout.RowHeader(key(n), 4096, n, 0, 0) for n in (5, 6, 7, 8, 1)
        ]), 5 * 4096, ("foreign", "headers_too_large")),
    ],
)  # fmt: skip
def test_a_pack_is_used_where_its_object_has_its_rows_and_this_server_can_hold_them(
    header: layout.PackHeader, body: int, read: tuple[str, str], tmp_path: Path
):
    objects = StoreObjects(folder_url(tmp_path))
    objects.put("pack", [layout.encode_header(header), bytes(body)])
    found = read_header(objects, "pack", "ns", key(1), Largest(4096, 4 * 4096))
    field, words = read
    assert (found.header == header) is not bool(field)
    assert words in getattr(found, field or "damage")


def test_rows_begin_behind_the_header_of_the_object_whatever_fields_it_has(tmp_path: Path):
    """Those of a server that writes more fields are read, and not removed as damaged."""
    pytest.importorskip("zstandard")
    keys = [key(n) for n in range(ROWS)]
    name = object_name("", "ns", keys[-1])
    data = wild_pack(keys, [], [Step("add", 0, 0, VALUES.index(b"\xff" * 9000))], compress=True)
    objects = FaultyObjects(folder_url(tmp_path))
    objects.put(name, memoryview(data))
    assert check(objects, PackObject("ns", keys[-1], name, len(data), 0.0)) == Checked(ROWS)
    with RealBucket(objects=objects) as bucket:
        bucket.tier.expect("ns", [Group(range(ROWS), keys)])
        bucket.drain()
        rows = bucket.tier.pin_all("ns", keys)
        results: list[bool] = []
        bucket.tier.verify(rows, results.extend)
        bucket.drain()
        assert results == [True] * ROWS
        assert rows[0].pack.seal == layout.seal_of(data)


def test_stretches_are_joined_where_one_goes_on_and_not_over_a_gap_or_an_overlap():
    first = Stretch(2, 0, 0, 16)
    assert [*joined([first, Stretch(3, 0, 32, 16)])] == [Stretch(5, 0, 0, 16)]
    for start in (16, 48):
        apart = [first, Stretch(3, 0, start, 16)]
        assert [*joined(apart)] == apart


class Store:
    """`Objects` of a store that has 100 bytes under each name, changed at these times."""

    def __init__(self, modified: dict[str, float]) -> None:
        self._modified = modified
        self.removed: list[str] = []

    def folders(self, prefix):
        return [prefix]

    def listing(self, folder):
        yield [Listed(name, 100, modified) for name, modified in self._modified.items()]

    def time(self, name):
        return 1000.0

    def remove(self, names):
        self.removed += names

    def remove_unfinished(self, folder, before):
        pass


def test_a_sweep_removes_the_oldest_packs_whatever_the_order_of_their_names():
    ages = [30.0, 10.0, 40.0, 20.0]
    names = [object_name("", "ns", key(n)) for n in range(4)]
    store = Store({name: 1000.0 - age for name, age in zip(names, ages, strict=True)})
    swept = sweep(store, "v1/=", range(PARTITIONS), Limits(num_bytes=200))
    assert store.removed == [names[2], names[0]]
    assert swept.removed == [("ns", key(2)), ("ns", key(0))]
    assert swept.num_bytes == 200
