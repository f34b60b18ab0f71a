"""Recency buffer: keys that memory served, for the disk's eviction policy."""

from collections.abc import Sequence

from remote_server.store.disk.tier import DiskTier

# A key takes 0.25 to 1 µs, so this many stop the loop for a millisecond at most.
MAX_KEYS = 1024


class RecencyBuffer:
    """Keys that were served since the disk's recency was last updated.

    Recency for the disk is batched: gets append keys here, and the buffer is applied before the
    disk evicts or reads. A block that many gets share is one use of its copy on disk.
    """

    def __init__(self, disk: DiskTier) -> None:
        self._disk = disk
        self._keys: dict[str, list[bytes]] = {}  # in the order served
        self._num_keys = 0

    def add(self, namespace: str, keys: Sequence[bytes]) -> None:
        """Append keys that were served, the last one as the most recently used. The disk need not
        have them."""
        self._keys.setdefault(namespace, []).extend(keys)
        self._num_keys += len(keys)
        if self._num_keys >= MAX_KEYS:
            self.flush()

    def flush(self) -> None:
        """Apply the buffer. To be called before any call of the disk that depends on recency."""
        if not self._num_keys:
            return
        served, self._keys, self._num_keys = self._keys, {}, 0
        for namespace, keys in served.items():
            last_first = dict.fromkeys(reversed(keys))  # of a key's uses only the last one counts
            self._disk.touch_all(namespace, [*reversed(last_first)])
