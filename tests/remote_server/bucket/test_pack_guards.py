"""Guards of the bucket: which pack a name may have, which rows a pack, and which pack leaves."""

import pytest
from wire_peer import key

from remote_server.protocol import Stretch
from remote_server.store.bucket import layout
from remote_server.store.bucket.objects import Listed
from remote_server.store.bucket.packs import PARTITIONS, joined, object_name
from remote_server.store.bucket.sweep import Limits, sweep


def test_a_header_counts_only_under_its_namespace_and_its_last_key():
    rows = [layout.RowHeader(key(n), 4096, n, n << 32, 1) for n in range(2)]
    encoded = layout.encode_header(layout.PackHeader("ns", 4096, rows))
    assert layout.decode_header(encoded, "ns", key(1)).rows == rows
    for namespace, last in (("other", key(1)), ("ns", key(0))):
        with pytest.raises(layout.PackDamaged, match="not the pack of its name"):
            layout.decode_header(encoded, namespace, last)


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
