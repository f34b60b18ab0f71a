"""What memory served, on its way to the disk."""

from remote_server.store.stack.way_down import MAX_RECENT_KEYS as MAX_KEYS
from remote_server.store.stack.way_down import RecencyBuffer

A, B, C, D = b"a", b"b", b"c", b"d"


class Disk:
    def __init__(self):
        self.told = []

    def touch_all(self, namespace, keys):
        self.told.append((namespace, keys))


def test_what_several_gets_share_is_told_once_when_it_is_asked_for_in_the_order_of_last_uses():
    disk = Disk()
    served = RecencyBuffer(disk)
    served.add("ns", [C, B, A])
    served.add("other", [A])
    served.add("ns", [D, B])
    served.add("ns", [A])
    assert disk.told == []
    served.flush()
    served.flush()
    assert sorted(disk.told) == [("ns", [C, D, B, A]), ("other", [A])]


def test_no_more_is_remembered_than_the_bound_however_long_nobody_asks():
    disk = Disk()
    served = RecencyBuffer(disk)
    keys = [b"%d" % number for number in range(MAX_KEYS - 1)]
    served.add("ns", keys)
    assert disk.told == []
    served.add("ns", [A])
    assert disk.told == [("ns", [*keys, A])]
    served.add("ns", [B])
    assert len(disk.told) == 1
