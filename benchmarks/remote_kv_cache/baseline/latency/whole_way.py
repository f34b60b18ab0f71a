"""A short prompt's whole way from a server: a lookup, the first block, all blocks.

The rows of a get belong to the caller when the get ends, so the first block of one get is usable
with the last. A caller that needs the first block earlier requests it by a get of its own, ahead
of the get of the others.
"""

import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from benchmarks.harness.runner import Case, Sample
from benchmarks.remote_kv_cache.baseline.latency.block_stores import FerryStore
from benchmarks.remote_kv_cache.work import blocks
from benchmarks.remote_kv_cache.work.blocks import Batch, Pool
from benchmarks.remote_kv_cache.work.ferry_client import PATIENCE_S, chain_of, key_of
from benchmarks.remote_kv_cache.work.results import Variant
from remote_server.client import GetResult

ONE_GET, APART = "one get", "first block apart"
WAYS = (ONE_GET, APART)
PARTS = LOOKUP, FIRST, ALL = "lookup", "first block", "all blocks"
"""The times, as `Times` has them."""

_PROMPT = "prompt, "


class Times(NamedTuple):
    """Seconds from the call of the lookup."""

    lookup: float
    first_block: float
    all_blocks: float


class WholeWay:
    """One client's way to the blocks of one prompt, which the server keeps."""

    def __init__(self, store: FerryStore, source: Pool, target: Pool, *, apart: bool) -> None:
        """`apart`: the first block has a get of its own."""
        self._store = store
        self._source, self._target = source, target
        self._keys = [key_of(number) for number in range(len(source))]
        self._rows = [memoryview(row) for row in target]
        self._chain = chain_of(self._keys, blocks.BLOCK_SIZE)
        self._cuts = [slice(0, 1), slice(1, None)] if apart else [slice(None)]
        self.trials: list[Times] = []
        """One a run."""

    def run(self) -> None:
        """Raises unless all blocks came."""
        client, namespace = self._store.client, self._store.namespace
        began = time.perf_counter()
        found = client.lookup(namespace, self._keys, timeout_s=PATIENCE_S, chain=self._chain)
        prefix = found.result().prefix
        looked_up = time.perf_counter()
        gets = [self._get(cut) for cut in self._cuts if self._keys[cut]]
        results = [gets[0].result()]
        first = time.perf_counter()
        results += [get.result() for get in gets[1:]]
        ended = time.perf_counter()
        self.trials.append(Times(looked_up - began, first - began, ended - began))
        landed = sum(len(result.landed) for result in results)
        if prefix != len(self._keys) or landed != len(self._keys):
            raise AssertionError(f"{prefix} found, {landed} came of {len(self._keys)} blocks")

    def _get(self, cut: slice) -> Future[GetResult]:
        return self._store.client.get(
            self._store.namespace, self._keys[cut], self._rows[cut], stall_s=PATIENCE_S,
            timeout_s=PATIENCE_S,
        )  # fmt: skip

    def prepare(self) -> None:
        blocks.poison(self._target)

    def verify(self) -> None:
        """Raises `WrongBytes`."""
        everything = np.arange(len(self._keys))
        blocks.verify(self._source, self._target, Batch(everything, everything))


def ways_of(
    stores: Mapping[str, FerryStore], source: Pool, target: Pool
) -> dict[Variant, WholeWay]:
    """Both ways by each transport, with checksums."""
    return {
        Variant(way, transport, True): WholeWay(store, source, target, apart=way == APART)
        for transport, store in stores.items()
        for way in WAYS
    }


def case_of(key: Variant, way: WholeWay) -> Case:
    return Case(key, way.run, way.prepare, way.verify)


def samples_of(
    samples: Mapping[Variant, Sample], ways: Mapping[Variant, WholeWay]
) -> dict[Variant, Sample]:
    """A sample of each of the three times, under `name_of` it."""
    found = {}
    for variant, sample in samples.items():
        trials = ways[variant].trials
        warm_ups = trials[: len(sample.warm_ups)]
        for number, part in enumerate(PARTS):
            made = replace(
                sample,
                values=[times[number] for times in sample.timed(trials)],
                warm_ups=[times[number] for times in warm_ups],
            )
            found[variant._replace(operation=name_of(variant.operation, part))] = made
    return found


def is_part(operation: str) -> bool:
    """Whether it is one of these samples."""
    return operation.startswith(_PROMPT)


def way_of(operation: str) -> str:
    """The way of one of these samples."""
    return operation.removeprefix(_PROMPT).partition(": ")[0]


def blocks_of(operation: str, num_blocks: int) -> int:
    """The blocks that have come by then, of a prompt of `num_blocks`; one of another operation."""
    if not is_part(operation):
        return 1
    come = {LOOKUP: 0, FIRST: num_blocks if ONE_GET in operation else 1, ALL: num_blocks}
    return come[operation.rpartition(": ")[2]]


def name_of(way: str, part: str) -> str:
    """As in `prompt, one get: first block`."""
    return f"{_PROMPT}{way}: {part}"
