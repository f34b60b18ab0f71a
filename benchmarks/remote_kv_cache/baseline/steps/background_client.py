"""A second client in the engine's process that moves 1 MiB blocks both ways in the background.

It has an I/O thread of its own, as the engine's client has, so it shares interpreter lock, cores
and server in the same way; the engine's own blocks are too few to load the client.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from benchmarks.harness.runner import NotJudged, WrongBytes
from benchmarks.remote_kv_cache.work import blocks
from benchmarks.remote_kv_cache.work.blocks import SharedPool
from benchmarks.remote_kv_cache.work.ferry_client import PATIENCE_S, key_of
from remote_server.client import PutResult, RemoteClient
from remote_server.values import MiB

BLOCK_BYTES = MiB
NAMESPACE = "background"
NUM_BLOCKS = 24
PIECE_BLOCKS = 6
"""Bytes of one put or get at full speed: those that the demo's engine stores after 512 tokens."""

NUM_OUTSTANDING = 2  # pieces in flight in each direction at full speed


class Moved(NamedTuple):
    """The traffic of the client, both ways together."""

    num_bytes: int
    seconds: float


NOTHING = Moved(0, 0.0)


class BackgroundClient:
    """Puts a pool's blocks and gets them back in a loop. Owns neither client nor server."""

    def __init__(self, client: RemoteClient, source: SharedPool, target: SharedPool) -> None:
        """Put the blocks for the gets; the pools hold `NUM_BLOCKS` blocks of 1 MiB."""
        self._client = client
        self._target = target
        self._source = source
        self._keys = [key_of(number) for number in range(NUM_BLOCKS)]
        self._put_keys = [key_of(NUM_BLOCKS + number) for number in range(NUM_BLOCKS)]
        self._from = [memoryview(row) for row in source.pool]
        self._to = [memoryview(row) for row in target.pool]
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._error: Exception | None = None
        self._num_bytes = 0
        self._started = 0.0
        kept = client.put(NAMESPACE, self._keys, self._from, deferred=False, timeout_s=PATIENCE_S)
        _check_put(kept.result())

    def start(self, bytes_per_s: float | None) -> None:
        """Begin at `bytes_per_s` each way; None: at full speed."""
        assert self._thread is None, "it already runs"
        blocks.poison(self._target.pool)
        self._stopping.clear()
        self._error, self._num_bytes, self._started = None, 0, time.perf_counter()
        pause = BLOCK_BYTES / bytes_per_s if bytes_per_s else None
        self._thread = threading.Thread(target=self._run, args=(pause,), name="background")
        self._thread.start()

    def stop(self) -> Moved:
        """End, and verify every block received. Raises the thread's error. No effect when idle."""
        if self._thread is None:
            return NOTHING
        self._stopping.set()
        self._thread.join()
        self._thread = None
        seconds = time.perf_counter() - self._started
        if self._error is not None:
            raise self._error
        everything = np.arange(min(NUM_BLOCKS, self._num_bytes // (2 * BLOCK_BYTES)))
        blocks.verify(self._source.pool, self._target.pool, blocks.Batch(everything, everything))
        return Moved(self._num_bytes, seconds)

    def close(self) -> None:
        """Stop in any state, and release the pools."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        self._from, self._to = [], []

    def _run(self, pause_s: float | None) -> None:
        try:
            self._move(pause_s)
        except Exception as error:  # raised again by `stop`
            self._error = error

    def _move(self, pause_s: float | None) -> None:
        waiting: deque[Callable[[], int]] = deque()
        next_s, first = time.perf_counter(), 0
        size = PIECE_BLOCKS if pause_s is None else 1
        while not self._stopping.is_set():
            waiting.extend(self._submit(slice(first, first + size)))
            first = (first + size) % NUM_BLOCKS
            while len(waiting) >= (2 * NUM_OUTSTANDING if pause_s is None else 1):
                self._num_bytes += waiting.popleft()()
            if pause_s is not None:
                next_s += pause_s
                self._stopping.wait(next_s - time.perf_counter())
        while waiting:
            self._num_bytes += waiting.popleft()()

    def _submit(self, piece: slice) -> list[Callable[[], int]]:
        """Submit a put and a get of a piece; each returned call awaits one, for its bytes."""
        put = self._client.put(
            NAMESPACE, self._put_keys[piece], self._from[piece], force=True, timeout_s=PATIENCE_S
        )
        got = self._client.get(
            NAMESPACE, self._keys[piece], self._to[piece], stall_s=PATIENCE_S, timeout_s=PATIENCE_S
        )

        def wait_for_put() -> int:
            return _check_put(put.result())

        def wait_for_get() -> int:
            result = got.result()
            if result.error is not None:
                raise NotJudged(f"a get of the second client: {result.error!r}")
            if len(result.landed) != len(result.outcomes):
                raise WrongBytes(f"not all blocks came: {result.outcomes}")
            return result.bytes

        return [wait_for_put, wait_for_get]


def _check_put(result: PutResult) -> int:
    """The bytes of a put. Blocks still being written count: their bytes were sent. Raises
    `NotJudged` when the server had no time or no room for all of them."""
    if result.error is not None or result.declined:
        why = repr(result.error) if result.error is not None else f"declined: {result.declined}"
        raise NotJudged(f"a put of the second client: {why}")
    return len(result.outcomes) * BLOCK_BYTES
