"""Verify requests: blocks are hashed again in place, some of them in each turn."""

from collections.abc import Callable, Sequence

from remote_server.server.copier import TURN_BYTES
from remote_server.server.put import is_intact
from remote_server.store.slabs import Block
from remote_server.store.store import Store
from remote_server.turns import KEYS_PER_STEP, parts


class VerifyJob:
    """Checks each key once, in memory and on disk, and removes damaged copies.

    The blocks that memory holds of a part of the keys are pinned while that part is hashed. A block
    that is evicted before its part begins counts as absent.
    """

    num_bytes = 0  # it holds no bytes of a put

    def __init__(
        self,
        store: Store,
        namespace: str,
        keys: Sequence[bytes],
        answer: Callable[[int, int], None],
    ) -> None:
        """`answer` is called once, with the number of keys with a damaged copy, and with only
        intact ones. The disk is read by other threads, so it may come after the last turn."""
        self._store = store
        self._namespace = namespace
        self._answer = answer
        self._parts = iter(parts([*dict.fromkeys(keys)]))
        self._part: Sequence[bytes] = ()
        self._blocks: list[Block] = []
        self._verdicts: dict[bytes, bool] = {}  # of memory, in this part
        self._bad = self._intact = 0
        self._num_waiting = 1  # for the disk, and for the last part

    def work_some(self) -> bool:
        """Hash blocks for one turn. True when all that memory holds has been hashed."""
        if not self._part:
            part = next(self._parts, ())
            if not part:
                return True
            self._part = part
            self._blocks = self._store.pin_to_verify(self._namespace, part)
            self._blocks.reverse()
        num_bytes, num_blocks = 0, 0
        while self._blocks and num_bytes < TURN_BYTES and num_blocks < KEYS_PER_STEP:
            block = self._blocks.pop()
            num_bytes, num_blocks = num_bytes + block.length, num_blocks + 1
            self._hash(block)
        if not self._blocks:
            self._end_part()
        return False

    def end(self, failed: bool) -> None:
        """All parts have been begun; or the hashing raised, which does not prove a block
        damaged."""
        if failed:
            self._store.tier.unpin_all(self._blocks)
        self._one_is_done()

    def _hash(self, block: Block) -> None:
        tier = self._store.tier
        good = True
        try:
            good = is_intact(block, tier)
            if not good:
                self._store.remove_corrupt(block)
        finally:
            self._verdicts[block.key] = good
            tier.unpin(block)

    def _end_part(self) -> None:
        """Check the same keys on disk, and go on meanwhile."""
        in_memory, self._verdicts = self._verdicts, {}
        part, self._part = self._part, ()
        self._num_waiting += 1

        def seen(on_disk: dict[bytes, bool]) -> None:
            keys = in_memory | on_disk
            intact = sum(in_memory.get(key, True) and on_disk.get(key, True) for key in keys)
            self._intact += intact
            self._bad += len(keys) - intact
            self._one_is_done()

        self._store.verify_on_disk(self._namespace, part, seen)

    def _one_is_done(self) -> None:
        self._num_waiting -= 1
        if not self._num_waiting:
            self._answer(self._bad, self._intact)
