"""Start-up canary: a self-test with one synthetic block on the path of real blocks.

    engine block → pool row → server → another pool row → another engine block, then compared

It finds errors that no checksum can: a copy that mixes up layers or rows, a layout read in another
way than it was written, a server that returns other bytes. Each worker runs it when the engine
registers its KV cache, before any block or row is in use, with the worker's own copying code, on
the CPU platform and on a GPU. It takes at most `CANARY_S`, restores the engine blocks and pool rows
that it borrowed, and removes its blocks from the server.
"""

import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum, auto
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingWorker
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kv_connector.pool.layout import Piece, Pieces, owned_by_groups
from kv_connector.pool.sharing import Place
from remote_server.client import ClientConfig, GetOutcome, GetResult, PutResult, RemoteClient
from remote_server.errors import ConfigError, KVFerryError
from remote_server.protocol import SELF_TESTS, Cleared, Declined

# vLLM counts its jobs from 0 and does not reach these.
_STORE_JOB, _LOAD_JOB = 1 << 62, (1 << 62) + 1

Bytes = npt.NDArray[np.int8]
Pages = dict[tuple[int, Piece], Bytes]
"""By KV cache group: each piece that the group's blocks own, (blocks, bytes)."""


@dataclass(frozen=True)
class Part:
    """A worker's own part of every row of the pool."""

    pool: memoryview
    """All of the pool, flat. Borrowed: the owner keeps it alive while this part is used."""

    fd: int
    """The pool's file."""

    place: Place

    block_bytes: int
    """Size of a whole row's block, all workers together."""

    def row(self, number: int) -> memoryview:
        """This worker's bytes of a row, in place."""
        first = number * self.place.stride + self.place.start
        return self.pool[first : first + self.place.num_bytes]


class Fixture:
    """One row's worth of engine blocks for each KV cache group: a source and a target.

    The sources are the first blocks of the cache and the first rows of the pool, the targets the
    last ones, so strides and offsets are tested over the whole of both. The middle row is never
    borrowed: it holds the marks of other workers. Workers that share one copy of a row borrow
    adjacent rows.
    """

    def __init__(
        self,
        worker: OffloadingWorker,
        kv_caches: CanonicalKVCaches,
        part: Part,
        blocks_per_row: int,
        owned: Pieces | None = None,
        *,
        turn: int = 0,
        turns: int = 1,
    ) -> None:
        """`owned` is what each group owns of a block, if `kv_caches` does not show it. Each of
        `turns` workers that share `part` has its own `turn`, and so its own rows. Raises
        `ValueError` when cache or pool is too small."""
        self._worker = worker
        self._tensors = [cache.tensor for cache in kv_caches.tensors]
        self._owned = owned_by_groups(kv_caches) if owned is None else owned
        self.part = part
        groups = len(self._owned)
        self.keys = [b"canary-%d" % group for group in range(groups)]
        """One for each row that is put."""
        num_rows = part.place.num_rows
        num_blocks = min(len(tensor) for tensor in self._tensors)
        self._per_group = min(blocks_per_row, num_blocks // (2 * groups))
        if self._per_group < 1 or num_rows <= 2 * groups * turns:
            raise ValueError(
                f"too little to borrow from: {num_blocks} engine blocks and {num_rows} rows "
                f"for {groups} KV cache groups of {turns} workers"
            )
        # Groups may overlap in one tensor, so each has blocks of its own.
        wanted = self._per_group * groups
        self._sources = list(range(wanted))
        self._targets = list(range(num_blocks - wanted, num_blocks))
        first, end = turn * groups, num_rows - turn * groups
        self._source_rows = list(range(first, first + groups))
        self._target_rows = list(range(end - groups, end))

    def source_rows(self) -> list[memoryview]:
        """The rows to put."""
        return [self.part.row(number) for number in self._source_rows]

    def target_rows(self) -> list[memoryview]:
        """The rows to get into, distinct from the source rows."""
        return [self.part.row(number) for number in self._target_rows]

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Blocks and rows may be written inside; their bytes are restored at the end. No copy or
        transfer may be under way then."""
        blocks = self._sources + self._targets
        numbers = self._source_rows + self._target_rows
        before = [tensor[blocks] for tensor in self._tensors]  # indexing by a list copies
        rows = [bytes(self.part.row(number)) for number in numbers]
        try:
            yield
        finally:
            for tensor, bytes_before in zip(self._tensors, before, strict=True):
                _write(tensor, blocks, bytes_before)
            for number, row in zip(numbers, rows, strict=True):
                self.part.row(number)[:] = row

    def write_pattern(self) -> None:
        """Fill every page of the sources with different bytes, and the targets with others."""
        random = np.random.default_rng(len(self._sources))
        for tensor in self._tensors:
            for blocks in (self._sources, self._targets):
                shape = (len(blocks), tensor.shape[1])
                pattern = random.integers(-128, 128, shape, np.int8)
                _write(tensor, blocks, torch.from_numpy(pattern).to(tensor.device))
        for row in self.target_rows():
            row[:] = bytes([0x5A]) * row.nbytes

    def store(self) -> None:
        """Copy sources → source rows with the worker's code; returns when done."""
        rows = CPULoadStoreSpec(self._source_rows)
        self._worker.submit_store(_STORE_JOB, self._blocks(self._sources), rows)
        self._finish(_STORE_JOB)

    def load(self) -> None:
        """Copy target rows → targets with the worker's code; returns when done."""
        rows = CPULoadStoreSpec(self._target_rows)
        self._worker.submit_load(_LOAD_JOB, rows, self._blocks(self._targets))
        self._finish(_LOAD_JOB)

    def sources(self) -> Pages:
        """The bytes of the source blocks."""
        return self._pages(self._sources)

    def targets(self) -> Pages:
        """The bytes of the target blocks."""
        return self._pages(self._targets)

    def _blocks(self, blocks: list[int]) -> GPULoadStoreSpec:
        groups = len(self._owned)
        return GPULoadStoreSpec(blocks, [self._per_group] * groups, [0] * groups)

    def _finish(self, job_id: int) -> None:
        self._worker.wait({job_id})
        finished: list[Any] = self._worker.get_finished()
        if [(one.job_id, one.success) for one in finished] != [(job_id, True)]:
            raise RuntimeError(f"the worker reports {finished} of one copy")

    def _pages(self, blocks: list[int]) -> Pages:
        pages: Pages = {}
        for group, pieces in enumerate(self._owned):
            own = blocks[group * self._per_group : (group + 1) * self._per_group]
            for piece in pieces:
                page = self._tensors[piece.tensor][own, piece.start : piece.end]
                pages[group, piece] = page.cpu().numpy()
        return pages


@torch.inference_mode()
def _write(tensor: torch.Tensor, blocks: list[int], pages: torch.Tensor) -> None:
    """In inference mode: some engines' caches cannot be written outside it."""
    tensor[blocks] = pages


logger = init_logger("vllm.kvferry.self_test")

# A busy host needs more than one second. An engine takes half a minute to start anyway.
CANARY_S = 5.0
# The part of `CANARY_S` that is reserved for removing the namespace from the server.
TIDYING_S = 0.5
# Most time for attaching shared memory; the canary then uses TCP.
ATTACHING_S = 0.5
LOOK_AGAIN_S = 0.002
# A transfer ends by its own deadline, and its rows are ours again only then. One that does not end
# is a bug, and its rows stay the client's.
_HANG_S = 30.0


class Outcome(StrEnum):
    """Result of a canary."""

    PASSED = auto()
    FAILED = auto()  # other bytes came back: this engine must not share blocks
    SKIPPED = auto()  # nothing was compared
    BROKEN = auto()  # the canary itself failed: a bug in kvferry that proves nothing


@dataclass(frozen=True)
class Report:
    """Result of one worker's canary, for the scheduler."""

    outcome: Outcome
    detail: str = ""
    miscopied: bool = False
    """Whether the copies between engine and pool failed."""

    failed: tuple[tuple[str, str], ...] = ()
    """Of several servers those that returned other bytes, by name, each with its reason."""


class Skip(Exception):
    """Nothing was compared; the message is the reason."""


class Differs(Exception):
    """Other bytes came back than were sent."""


class Miscopied(Differs):
    """A copy between engine and pool changed bytes; no server was involved."""


def run_self_test(
    make_stage: Callable[[], Fixture],
    config: ClientConfig,
    *,
    client_factory: Callable[[ClientConfig], RemoteClient] = RemoteClient,
    clock: Callable[[], float] = time.monotonic,
) -> Report:
    """Run one canary and return its result. Never raises.

    Blocks and rows of the stage are borrowed until it returns; no other thread may use them.
    """
    return reported(lambda: SelfTest(config, client_factory, clock).run(make_stage))


def reported(run: Callable[[], Report]) -> Report:
    """The report of `run`, or of its end by an exception; logged."""
    try:
        report = run()
    except (Skip, ConfigError) as reason:  # the tier reports the latter to the operator
        report = Report(Outcome.SKIPPED, str(reason))
    except Differs as difference:
        report = Report(Outcome.FAILED, str(difference), isinstance(difference, Miscopied))
    except Exception as error:  # a self-test must not stop the engine
        logger.exception("the start-up canary itself failed")
        report = Report(Outcome.BROKEN, repr(error))
    logger.info("start-up canary %s: %s", report.outcome, report.detail)
    return report


class SelfTest:
    def __init__(
        self,
        config: ClientConfig,
        client_factory: Callable[[ClientConfig], RemoteClient],
        clock: Callable[[], float],
    ) -> None:
        """For one server. A caller with several uses the parts of `run`."""
        self._clock = clock
        self.ends_at = clock() + CANARY_S
        self.config = replace(config, quiet=True, hello_timeout_s=2 * CANARY_S)
        self._client_factory = client_factory
        # No name of `namespace_of` has a slash; the random part differs in every canary.
        self._namespace = f"{SELF_TESTS}canary/{secrets.token_hex(16)}"

    def run(self, make_stage: Callable[[], Fixture]) -> Report:
        """PASSED: all bytes were equal. Raises `Skip` or `Differs`."""
        try:
            stage = make_stage()
        except ValueError as error:
            raise Skip(str(error)) from error
        client = self._client_factory(self.config)
        try:
            self.connect(stage, client)
            self._until_ready(client)
            with stage.borrowed():
                stage.write_pattern()
                stage.store()
                self.there_and_back(stage, client)
                stage.load()
                compare_pages(stage.sources(), stage.targets())
            return Report(Outcome.PASSED, f"over {client.transport}")
        finally:
            try:
                self._tidy(client)
            finally:
                client.close(max(0.05, self._left_s))

    def connect(self, stage: Fixture, client: RemoteClient) -> None:
        client.register(stage.part.pool, stage.part.fd)
        client.declare(self._namespace, stage.part.block_bytes)

    def there_and_back(self, stage: Fixture, client: RemoteClient) -> None:
        """Source rows → server → target rows. Raises `Skip` or `Differs`."""
        self._put(client, stage)
        self._get(client, stage)
        for number, (sent, got) in enumerate(
            zip(stage.source_rows(), stage.target_rows(), strict=True)
        ):
            _compare(f"row {number} of the pool came back from the server", sent, got)

    # ── the server ───────────────────────────────────────────────────────────────────────

    @property
    def _left_s(self) -> float:
        return self.ends_at - self._clock()

    def _timeout_s(self) -> float:
        left = self._left_s - TIDYING_S
        if left <= 0:
            raise Skip("the server is too slow for a canary")
        return left

    def _until_ready(self, client: RemoteClient) -> None:
        while not client.ready:
            if client.absent:
                raise Skip("no server there yet")
            if self._left_s <= TIDYING_S:
                raise Skip("the server did not answer in time")
            time.sleep(LOOK_AGAIN_S)
        attached_by = self._clock() + ATTACHING_S
        while self.config.transport == "auto" and client.transport != "shm":
            if self._clock() >= attached_by or client.counters()["shm_refused"]:
                break
            time.sleep(LOOK_AGAIN_S)

    def _put(self, client: RemoteClient, stage: Fixture) -> None:
        put: PutResult = client.put(
            self._namespace,
            stage.keys,
            stage.source_rows(),
            deferred=False,
            timeout_s=self._timeout_s(),
        ).result(_HANG_S)
        if put.error is not None:
            raise Skip(f"the put did not end well: {put.error}")
        if Declined.CHECKSUM in put.declined:
            raise Differs("the server received other bytes than were put")
        if put.declined:
            raise Skip(f"the server kept nothing: {put.declined}")

    def _get(self, client: RemoteClient, stage: Fixture) -> None:
        left = self._timeout_s()
        got: GetResult = client.get(
            self._namespace, stage.keys, stage.target_rows(), stall_s=left, timeout_s=left
        ).result(_HANG_S)
        if GetOutcome.CORRUPT in got.outcomes:
            raise Differs("the server's answer failed its checksum or its length")
        if len(got.landed) < len(stage.keys):
            raise Skip(f"the get did not end well: {got.error or 'evicted at once'}")

    def _tidy(self, client: RemoteClient) -> None:
        """Remove blocks and namespace from the server. Also sent to a server that has not replied
        yet: it processes messages in order."""
        try:
            self.clear(client).result(_HANG_S)
        except KVFerryError as error:
            # The blocks that remain are never read, so the server evicts them first.
            logger.debug("the canary could not be cleared: %s", error)

    def clear(self, client: RemoteClient) -> "Future[Cleared]":
        """Have the server forget the namespace and its blocks."""
        client.forget(self._namespace)
        timeout_s = max(0.05, self._left_s - 0.05)
        return client.clear(self._namespace, forget=True, timeout_s=timeout_s)


def _compare(what: str, sent: memoryview, got: memoryview) -> None:
    differ = np.flatnonzero(np.frombuffer(sent, np.int8) != np.frombuffer(got, np.int8))
    if len(differ):
        raise Differs(f"{what} with {len(differ)} of {len(sent)} bytes changed, from {differ[0]}")


def compare_pages(sent: Pages, got: Pages) -> None:
    bad = [place for place, pages in sent.items() if not np.array_equal(pages, got[place])]
    if bad:
        group, (tensor, *_) = bad[0]
        changed = np.count_nonzero(sent[bad[0]] != got[bad[0]])
        raise Miscopied(
            f"{len(bad)} of {len(sent)} layers differ after the copies between engine and pool; "
            f"the first is tensor {tensor} of group {group}, {changed} of {sent[bad[0]].size} bytes"
        )
