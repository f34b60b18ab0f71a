"""What memory served, for the disk to know which of its blocks are in use."""

from collections.abc import Sequence

from remote_server.store.disk.tier import DiskTier

# A key costs the disk 0.25 to 1 µs, so this many stop the loop for a millisecond at most.
MAX_KEYS = 1024


class Served:
    """Keys that were served since the disk was last told.

    The disk needs to know before it uses or evicts anything else, and not sooner: so a get only
    leaves its keys here, and a block that many gets share is one use of its copy.
    """

    def __init__(self, disk: DiskTier) -> None:
        self._disk = disk
        self._keys: dict[str, list[bytes]] = {}  # as they were served, the last one last
        self._num_keys = 0

    def add(self, namespace: str, keys: Sequence[bytes]) -> None:
        """These were served, the last one as the most recently used. The disk need not have
        them."""
        self._keys.setdefault(namespace, []).extend(keys)
        self._num_keys += len(keys)
        if self._num_keys >= MAX_KEYS:
            self.tell_disk()

    def tell_disk(self) -> None:
        """To be called before the disk is asked for anything that depends on recency."""
        if not self._num_keys:
            return
        served, self._keys, self._num_keys = self._keys, {}, 0
        for namespace, keys in served.items():
            last_first = dict.fromkeys(reversed(keys))  # of a key's uses only the last one counts
            self._disk.touch_all(namespace, [*reversed(last_first)])
