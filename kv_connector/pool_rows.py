"""Rows of the pool: their sizes, and the reservation of rows for loads."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec


# The part of the pool that loads may fill; the rest is for computed blocks and puts. A key at a
# later position is a miss: the loads of a prompt longer than the pool evict the prompt's own
# earlier rows, and vLLM would never admit it.
POOL_SHARE_FOR_LOADS = 0.75


class PoolRows:
    """Views of the pool's rows, cut to the bytes that a block owns.

    A row may end in padding to a page. `block_bytes` excludes it, so it is neither hashed nor sent.
    """

    def __init__(self, pool: memoryview, spec: "OffloadingSpec") -> None:
        assert pool.shape is not None and pool.strides is not None
        self.count: int = pool.shape[0]
        self.block_bytes = owned_bytes(spec, pool.strides[0])
        self._stride: int = pool.strides[0]
        self.memory = pool.cast("B")
        """All of the pool, for a transport that maps it as a whole."""
        self._tokens_per_row = max(spec.tokens_per_block) * spec.blocks_per_chunk
        self._rows_per_stretch = len(spec.tokens_per_block)
        """Rows that hold the same tokens: one for each KV cache group."""
        sizes = set(spec.tokens_per_block)
        # vLLM stores the partial block at the end of a prompt only for models with several groups,
        # all of one block size.
        self._tokens_of_a_whole_row = (
            self._tokens_per_row if len(sizes) == 1 < self._rows_per_stretch else 1
        )
        self.rows_for_loads = int(self.count * POOL_SHARE_FOR_LOADS)
        """Rows that waiting prompts may fill with blocks of the server."""
        tokens = self.rows_for_loads // self._rows_per_stretch * self._tokens_per_row
        self.last_token_of_a_prompt = tokens
        """The last token of a prompt whose block fits in the pool together with all blocks before
        it."""

    def at(self, rows: Iterable[int]) -> list[memoryview]:
        """The bytes of these rows, in place. They stay valid until `release`."""
        return [
            self.memory[row * self._stride : row * self._stride + self.block_bytes]
            for row in map(int, rows)
        ]

    def is_partial(self, end_token: int | None) -> bool:
        """Whether a key whose tokens end there identifies only the first part of a block. The rest
        of its row is not its own: later tokens, or older content of the engine's block."""
        return bool(end_token and end_token % self._tokens_of_a_whole_row)

    def tokens_of(self, num_rows: int) -> int:
        """Prompt tokens whose blocks these rows hold."""
        return num_rows * self._tokens_per_row // self._rows_per_stretch

    def release(self) -> None:
        """Release the pool's memory; views from `at` must not be used afterwards."""
        self.memory.release()


def owned_bytes(spec: "OffloadingSpec", row_bytes: int) -> int:
    """The bytes of a row that belong to its block, without the padding at its end."""
    per_worker: int = getattr(spec, "cpu_page_size_per_worker", 0)
    copies = 1 if spec.replicated_layout else spec.config.parallel.world_size
    owned = per_worker * copies
    return owned if 0 < owned <= row_bytes else row_bytes


# Lookups without progress before a request gives up. An admitted prompt releases its room only
# after its rows were copied to the engine, which takes a few steps.
LOOKS_WITHOUT_PROGRESS = 8


class Room(Enum):
    """Result of a request for rows."""

    GRANTED = auto()
    WAIT = auto()
    NEVER = auto()  # other prompts hold their rows and make no progress


@dataclass(slots=True)
class _Waiter:
    """A request that waits for rows, and the time without a release of any."""

    releases: int
    step: int
    now_s: float
    looks: int = 0
    waited_s: float = 0.0


class PoolRoom:
    """Rows reserved for requests, first come, first served.

    While a request waits, later ones of the same step wait too. Otherwise short prompts could
    starve a long one.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._held: dict[str, int] = {}
        self._waiters: dict[str, _Waiter] = {}
        self._releases = 0
        self._full_in_step = -1

    @property
    def num_held(self) -> int:
        """Rows reserved and not released."""
        return sum(self._held.values())

    def take(self, request_id: str, rows: int, *, most_rows: int, now_s: float, step: int) -> Room:
        """Reserve `rows` rows in all for this request, including those it holds, while all requests
        together hold at most `most_rows`. A request alone always gets room."""
        held = self._held.get(request_id, 0)
        # A request that holds rows gets more: two that wait for each other would deadlock.
        if not held and (
            self._full_in_step == step or (self._held and self.num_held + rows > most_rows)
        ):
            self._full_in_step = step
            return self._wait(request_id, now_s, step)
        self._held[request_id] = max(held, rows)
        self._waiters.pop(request_id, None)
        return Room.GRANTED

    def release(self, request_id: str) -> None:
        """The request was scheduled or has ended: release its room, if it has any."""
        self._waiters.pop(request_id, None)
        if self._held.pop(request_id, None) is not None:
            self._releases += 1

    def _wait(self, request_id: str, now_s: float, step: int) -> Room:
        waiter = self._waiters.get(request_id)
        if waiter is None or waiter.releases != self._releases:
            self._waiters[request_id] = _Waiter(self._releases, step, now_s)
            return Room.WAIT
        if step == waiter.step + 1:  # else the engine was busy meanwhile and made no lookups
            waiter.waited_s += now_s - waiter.now_s
            waiter.looks += 1
        waiter.step, waiter.now_s = step, now_s
        stuck = waiter.waited_s > self._patience_s and waiter.looks >= LOOKS_WITHOUT_PROGRESS
        return Room.NEVER if stuck else Room.WAIT
