"""Copying and hashing of blocks on the loop thread, in turns: jobs of puts and verifies, and bounds
on the bytes that wait for it."""

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Protocol

from remote_server import protocol
from remote_server.errors import RequestRefused
from remote_server.guard import Guard
from remote_server.protocol import ErrorCode
from remote_server.store.memory.slabs import Block
from remote_server.store.memory.tier import MemoryTier
from remote_server.store.store import Store
from remote_server.turns import KEYS_PER_STEP, Turns, parts
from remote_server.values import MiB, format_bytes

log = logging.getLogger(__name__)

# Bytes copied before requests get their turn again: about half a millisecond.
TURN_BYTES = 4 * MiB

# While more bytes wait to be copied, a put is answered only after its copy, so that its sender
# waits. Little, because bytes that wait fall out of the CPU's cache.
MAX_QUEUED_BYTES = 4 * MiB


class Job(Protocol):
    """Work on bytes, a turn at a time."""

    @property
    def num_bytes(self) -> int:
        """The bytes of a put, until they are copied; otherwise 0."""

    def work_some(self) -> bool:
        """Work for one turn. True when there is nothing left to do."""

    def end(self, failed: bool) -> None:
        """Called once: when `work_some` has returned True, or has raised."""


def is_intact(block: Block, tier: MemoryTier) -> bool:
    """Whether the bytes of `block` still hash to its checksum. A block without one gets it."""
    computed = protocol.checksum(block.namespace, block.key, tier.view(block))
    if block.checksum is None:
        block.checksum = computed
    return computed == block.checksum


# Of one connection, received and not copied yet. Our client has 48 MiB unanswered at most.
MAX_UNCOPIED_BYTES = 64 * MiB

# Of all connections of a tenant together; an eighth of its memory where that is more.
LEAST_UNCOPIED_BYTES = 256 * MiB

# What a waiting request takes for each key, beside blocks: key, numbers, frame and view.
BYTES_PER_KEY = 1024


class Uncopied:
    """The bytes of one tenant's requests that wait, frames and objects together. One thread."""

    def __init__(self, budget: int) -> None:
        """`budget` is the tenant's memory."""
        self._most = max(LEAST_UNCOPIED_BYTES, budget // 8)
        self._of: Counter[bytes] = Counter()
        self.total = 0

    def __getitem__(self, client: bytes) -> int:
        return self._of[client]

    def items(self) -> list[tuple[bytes, int]]:
        """Each client with waiting requests, and their bytes."""
        return [*self._of.items()]

    def check(self, client: bytes, num_bytes: int) -> None:
        """Raise `RequestRefused` when so much of `client` may not wait. A message that is alone
        always may. A refused message is dropped at once, with its bytes."""
        theirs = self._of[client]
        if theirs + num_bytes > max(MAX_UNCOPIED_BYTES, num_bytes):
            raise RequestRefused(
                ErrorCode.TOO_MUCH_IN_FLIGHT,
                f"{format_bytes(theirs)} of this connection's puts are not copied "
                f"yet, at most {format_bytes(MAX_UNCOPIED_BYTES)}: wait for answers",
            )
        if self.total + num_bytes > max(self._most, num_bytes):
            raise RequestRefused(
                ErrorCode.TOO_MUCH_IN_FLIGHT,
                f"{format_bytes(self.total)} of puts are not copied yet, at most "
                f"{format_bytes(self._most)}: retry in a moment",
            )

    def take(self, client: bytes, num_bytes: int) -> None:
        self._of[client] += num_bytes
        self.total += num_bytes

    def give_back(self, client: bytes, num_bytes: int) -> None:
        """The reverse of `take`."""
        self.total -= num_bytes
        self._of[client] -= num_bytes
        if not self._of[client]:
            del self._of[client]


def waiting_bytes(num_keys: int, num_bytes: int = 0) -> int:
    """What a request with so many keys, and so many bytes of blocks in frames, takes."""
    return num_keys * BYTES_PER_KEY + num_bytes


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
        client: bytes,
        uncopied: Uncopied,
        answer: Callable[[int, int], None],
    ) -> None:
        """Counts as `uncopied` of `client` until its answer. Raises `RequestRefused` when it may
        not wait. `answer` is called once, with the number of keys with a damaged copy, and with
        only intact ones. The disk is read by other threads, so it may come after the last turn."""
        waiting = waiting_bytes(len(keys))
        uncopied.check(client, waiting)
        uncopied.take(client, waiting)
        self._give_back = partial(uncopied.give_back, client, waiting)
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
        """All parts have been begun; or the hashing raised, which proves no block damaged."""
        if failed:
            self._store.memory.unpin_all(self._blocks)
        self._one_is_done()

    def _hash(self, block: Block) -> None:
        tier = self._store.memory
        good = True
        try:
            good = is_intact(block, tier)
            if not good:
                self._store.remove_corrupt(block)
        finally:
            self._verdicts[block.key] = good
            tier.unpin_all((block,))

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

        self._store.verify_below(self._namespace, part, seen)

    def _one_is_done(self) -> None:
        self._num_waiting -= 1
        if not self._num_waiting:
            self._give_back()
            self._answer(self._bad, self._intact)


class Copier:
    """Jobs of all connections, in turns. Those of one connection are done in the order submitted,
    so that its forced puts take effect in order of arrival.

    A thread of its own gains nothing: libzmq's thread already receives while this copies, and two
    Python threads lost more by passing the interpreter's lock than they gained by overlap.
    """

    def __init__(self, guard: Guard | None = None) -> None:
        self._guard = guard or Guard()
        self.turns: Turns[Job] = Turns()
        """The jobs that are not finished."""

    @property
    def busy(self) -> bool:
        """Some job has been submitted and not finished."""
        return bool(self.turns.num_waiting)

    def is_full(self) -> bool:
        """So much waits that the answer to a put must wait for its copy."""
        return self.turns.num_bytes > MAX_QUEUED_BYTES

    def submit(self, job: Job, client: Hashable = b"", tenant: str = "") -> None:
        """Queue `job`, of the connection `client` of `tenant`."""
        self.turns.add(tenant, client, job, job.num_bytes)

    def copy_some(self) -> bool:
        """Give the next job its turn. True when there is more to do at once."""
        if not self.turns.num_waiting:
            return False
        self.turns.take_turn(self._work_some)
        return self.busy

    def drop(self, client: Hashable) -> None:
        """`client` has left, and what its jobs copy from is gone: end them."""
        for job in self.turns.drop(client):
            self._end(job, failed=False)

    def stop(self) -> None:
        """End unfinished jobs. Their blocks stay unpublished."""
        for job in self.turns.drop_all():
            self._end(job, failed=True)

    def _work_some(self, job: Job) -> bool:
        failed = False
        try:
            if not job.work_some():
                return False
        except Exception:  # one job must never end the server for all others
            log.exception("a copy failed; its blocks are dropped")
            failed = True
        self._end(job, failed)
        return True

    def _end(self, job: Job, failed: bool) -> None:
        self._guard.run("the end of a copy", partial(job.end, failed), None)
