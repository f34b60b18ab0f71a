"""Blocks through memory, and through a server over shared memory or tcp."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from benchmarks.kvbench.transfer import Range
from benchmarks.remote_kv_cache.work.blocks import Pool
from benchmarks.remote_kv_cache.work.ferry_client import (
    PATIENCE_S,
    Client,
    anchors_of,
    key_of,
)
from remote_server.client import GetResult, PutResult
from remote_server.client.cache_requests import Anchors
from remote_server.values import MiB

REQUEST_BYTES = 8 * MiB
"""About the bytes of one request: at most those that vLLM submits of a prompt in one step."""


def blocks_per_request(block_bytes: int) -> int:
    return max(1, REQUEST_BYTES // block_bytes)


class Rows:
    """Source and target of blocks: a row for each, `block_bytes` of it in use."""

    def __init__(self, source: Pool, target: Pool, block_bytes: int) -> None:
        """Both are (blocks, bytes) with rows of at least a block."""
        self.source_pool, self.target_pool = source[:, :block_bytes], target[:, :block_bytes]
        self.source = [memoryview(row) for row in self.source_pool]
        self.target = [memoryview(row) for row in self.target_pool]
        self.padded_source, self.padded_target = source, target
        self.block_bytes = block_bytes

    def __len__(self) -> int:
        return len(self.source)


class Memory:
    """Copies on the calling thread: the bound of all ways that keep a second copy."""

    def __init__(self, rows: Rows, kept: Pool) -> None:
        """`kept` is the memory for written blocks, as large as the rows."""
        self.blocks_per_request = blocks_per_request(rows.block_bytes)
        self._rows = rows
        self._kept = [memoryview(row)[: rows.block_bytes] for row in kept]

    def prepare_write(self, places: Range) -> list[tuple[memoryview, memoryview]]:
        return [(self._kept[place], self._rows.source[place]) for place in places]

    def prepare_read(self, places: Range) -> list[tuple[memoryview, memoryview]]:
        return [(self._rows.target[place], self._kept[place]) for place in places]

    def post(self, request: list[tuple[memoryview, memoryview]]) -> None:
        for target, source in request:
            target[:] = source

    def wait(self, request: object) -> None:
        """Does nothing: `post` has copied the blocks."""


@dataclass
class ServerRequest:
    """A put or a get of some blocks; `future` is set once it was posted."""

    keys: Sequence[bytes]
    rows: Sequence[memoryview]
    anchors: Anchors
    is_put: bool
    future: Future[Any] | None = field(default=None)


class Server:
    """Blocks through a server in another process. A put ends when its blocks are readable."""

    def __init__(
        self, client: Client, namespace: str, rows: Rows, places_of_a_prompt: int = 0,
        row_tokens: int = 1,
    ) -> None:  # fmt: skip
        """Each `places_of_a_prompt` rows are a prompt, or the part of one that a rank holds, of
        `row_tokens` tokens each. 0: all rows are."""
        self.blocks_per_request = blocks_per_request(rows.block_bytes)
        self._client = client
        self._namespace = namespace
        self._rows = rows
        self._anchors: list[bytes | None] = []
        step = places_of_a_prompt or len(rows)
        for first in range(0, len(rows), step):
            end = min(first + step, len(rows))
            self._anchors += anchors_of(client, [*map(key_of, range(first, end))], row_tokens)

    def prepare_write(self, places: Range) -> ServerRequest:
        return ServerRequest(
            [key_of(place) for place in places],
            self._rows.source[places.start : places.stop],
            self._anchors[places.start : places.stop],
            is_put=True,
        )

    def prepare_read(self, places: Range) -> ServerRequest:
        return ServerRequest(
            [key_of(place) for place in places],
            self._rows.target[places.start : places.stop],
            self._anchors[places.start : places.stop],
            is_put=False,
        )

    def post(self, request: ServerRequest) -> None:
        if request.is_put:
            request.future = self._client.put(
                self._namespace, request.keys, request.rows, deferred=False, timeout_s=PATIENCE_S,
                anchors=request.anchors,
            )  # fmt: skip
        else:
            request.future = self._client.get(
                self._namespace, request.keys, request.rows,
                stall_s=PATIENCE_S, timeout_s=PATIENCE_S, anchors=request.anchors,
            )  # fmt: skip

    def wait(self, request: ServerRequest) -> None:
        assert request.future is not None, "waiting for what was not posted"
        result = request.future.result()
        made_it = len(result.landed) if isinstance(result, GetResult) else _kept(result)
        if made_it != len(request.keys):
            raise AssertionError(f"{made_it} of {len(request.keys)} blocks made it: {result}")

    def clear(self) -> None:
        self._client.clear(self._namespace, timeout_s=PATIENCE_S).result()

    @property
    def num_kept(self) -> int:
        """The number of readable blocks, from the first on."""
        keys = [key_of(place) for place in range(len(self._rows))]
        prefix = 0
        for first in range(0, len(keys), 16_384):
            part = keys[first : first + 16_384]
            found = self._client.lookup(
                self._namespace, part, timeout_s=PATIENCE_S,
                anchors=self._anchors[first : first + len(part)],
            ).result()  # fmt: skip
            prefix += found.prefix
            if found.prefix < len(part):
                break
        return prefix


def _kept(result: PutResult) -> int:
    return result.created + result.existed + result.forced
