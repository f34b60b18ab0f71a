"""A model of the bucket below the server's two levels: its packs are the product's own.

A block of the trace is several rows of an engine, so that packs have the tokens that they have in
a real bucket. Rows are found by whole blocks of the trace.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from remote_server.protocol import Stretch
from remote_server.store.bucket.index.names import ABSENT_S
from remote_server.store.bucket.packs.grouping import packs_in, rows_per_pack
from remote_server.store.bucket.transfers.headers import MAX_HEADERS_PER_LOOKUP
from remote_server.store.bucket.upkeep.sweep import Limits
from remote_server.store.chains import Group
from remote_server.store.stack.admission import Admit
from remote_server.traces.mooncake import TOKENS_PER_BLOCK


class Lost(StrEnum):
    """Why blocks are not found that unlimited memory would have."""

    TAIL = "tail"  # no prompt before had the whole pack
    NOT_ADMITTED = "not admitted"  # an earlier prompt had it, and it was not written
    REMOVED = "removed"  # by age or budget


class Shape(NamedTuple):
    """The rows and packs of a model in a bucket."""

    token_bytes: int
    """Of KV cache."""
    row_tokens: int
    pack_bytes: int
    block_tokens: int = TOKENS_PER_BLOCK
    """Of the trace; a multiple of `row_tokens`, and at most 256 times that."""

    @property
    def rows_per_block(self) -> int:
        return self.block_tokens // self.row_tokens

    @property
    def row_bytes(self) -> int:
        return self.token_bytes * self.row_tokens

    @property
    def rows_of_a_pack(self) -> int:
        return rows_per_pack(self.row_tokens, self.row_bytes, self.pack_bytes)

    @property
    def pack_tokens(self) -> int:
        return self.rows_of_a_pack * self.row_tokens

    @property
    def rows_of_a_part(self) -> int:
        """Rows that are in the same packs and of the same block."""
        return min(self.rows_of_a_pack, self.rows_per_block)

    def parts(self, rows: Iterable[bytes]) -> list[bytes]:
        """The last row of each part: it stands for all of them."""
        return [row for row in rows if not (row[-1] + 1) % self.rows_of_a_part]

    def parts_of(self, block: bytes) -> list[bytes]:
        step = self.rows_of_a_part
        return [block + bytes([n]) for n in range(step - 1, self.rows_per_block, step)]

    def packs(self, blocks: Sequence[bytes], first: int = 0) -> Iterator[Group]:
        """The packs of these blocks of a prompt, the first of which is its number `first`. The keys
        of their rows begin with that of their block and end with one byte."""
        rows = [key + bytes([n]) for key in blocks for n in range(self.rows_per_block)]
        return self._packs(rows, first * self.block_tokens)

    def num_rows_in_packs(self, tokens: int) -> int:
        """Of a prompt of `tokens` tokens, in rows."""
        rows = [b""] * (tokens // self.row_tokens)
        return sum(len(group.keys) for group in self._packs(rows, 0))

    def _packs(self, rows: Sequence[bytes], start: int) -> Iterator[Group]:
        chain = [Stretch(len(rows), 0, start, self.row_tokens)] if rows else []
        return packs_in(rows, chain, self.row_bytes, self.pack_bytes)


class BucketModel:
    """Packs in a bucket, with the requests that they take. One server, which has always run.

    A pack is in the bucket as soon as it is wanted. Limits hold at once: a real server sweeps one
    partition a minute.
    """

    def __init__(
        self, shape: Shape, admit: Admit, limits: Limits, above: Callable[[bytes], bool]
    ) -> None:
        """`above` returns whether a block is in the tiers above."""
        self.requests: Counter[str] = Counter()
        """`put`: packs written. `get`: packs read. `header`: beginnings of objects that were
        looked for, by a get of a range."""
        self.lost: Counter[Lost] = Counter()
        """Blocks that unlimited memory would have found, by the reason of the first of them."""
        self.written_bytes = self.read_bytes = 0
        self._shape = shape
        self._admit = admit
        self.limits = limits
        self._above = above
        self._now = 0.0
        self._packs: OrderedDict[bytes, _Pack] = OrderedDict()
        """By name, the oldest first."""
        self._pack_of: dict[bytes, bytes] = {}
        """A pack of each part that is in one."""
        self._absent_until: dict[bytes, float] = {}
        self._of_prompts: set[bytes] = set()
        """Parts of the whole packs of all prompts so far."""
        self._were_written: set[bytes] = set()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._packs)

    def looked_up(self, now: float, blocks: Sequence[bytes], first: int) -> None:
        """A lookup of these blocks of a prompt, of which `first` is the number of the first."""
        self._now = now
        self._expire()
        headers = 0
        for group in self._shape.packs(blocks, first):
            if group.name in self._packs:
                continue
            if self._absent_until.get(group.name, 0.0) <= now and headers < MAX_HEADERS_PER_LOOKUP:
                headers += 1
                self._absent_until[group.name] = now + ABSENT_S
            if self._is_above(group):
                self._write(group)
        self.requests["header"] += headers

    def stored(self, blocks: Sequence[bytes]) -> None:
        """All blocks of a prompt are in the tiers above now, as far as these have room."""
        for group in self._shape.packs(blocks):
            self._of_prompts.update(self._shape.parts(group.keys))
            is_new = group.name not in self._packs
            if is_new and self._admit is Admit.ALL and self._is_above(group):
                self._write(group)

    def holds(self, block: bytes) -> bool:
        return all(part in self._pack_of for part in self._shape.parts_of(block))

    def get(self, blocks: Iterable[bytes]) -> None:
        """Read the packs of these blocks, which it holds."""
        names = {self._pack_of[part] for block in blocks for part in self._shape.parts_of(block)}
        self.requests["get"] += len(names)
        self.read_bytes += sum(self._packs[name].num_bytes for name in names)

    def missed(self, block: bytes, num_blocks: int) -> None:
        """`block`, which unlimited memory has, is not found, nor are those behind it: `num_blocks`
        in all."""
        parts = [part for part in self._shape.parts_of(block) if part not in self._pack_of]
        if not self._of_prompts.issuperset(parts):
            why = Lost.TAIL
        elif self._were_written.issuperset(parts):
            why = Lost.REMOVED
        else:
            why = Lost.NOT_ADMITTED
        self.lost[why] += num_blocks

    def check(self) -> None:
        """Assert that parts and packs agree and that the budget is kept."""
        assert all(part in self._packs[name].parts for part, name in self._pack_of.items())
        assert self.num_bytes == sum(pack.num_bytes for pack in self._packs.values())
        assert not self.limits.num_bytes or self.num_bytes <= self.limits.num_bytes

    def _is_above(self, group: Group) -> bool:
        return all(map(self._above, {row[:-1] for row in group.keys}))

    def _write(self, group: Group) -> None:
        num_bytes, parts = len(group.keys) * self._shape.row_bytes, self._shape.parts(group.keys)
        self._packs[group.name] = _Pack(self._now, num_bytes, parts)
        self._pack_of.update(dict.fromkeys(parts, group.name))
        self._were_written.update(parts)
        self.requests["put"] += 1
        self.written_bytes += num_bytes
        self.num_bytes += num_bytes
        while self.limits.num_bytes and self.num_bytes > self.limits.num_bytes:
            self._remove_oldest()

    def _expire(self) -> None:
        oldest = self._now - self.limits.max_age_s
        while self.limits.max_age_s and self._packs and self._oldest().date < oldest:
            self._remove_oldest()

    def _oldest(self) -> "_Pack":
        return next(iter(self._packs.values()))

    def _remove_oldest(self) -> None:
        name, pack = self._packs.popitem(last=False)
        self.num_bytes -= pack.num_bytes
        for part in pack.parts:
            if self._pack_of.get(part) == name:  # not in another pack too
                del self._pack_of[part]


class _Pack(NamedTuple):
    date: float
    num_bytes: int
    parts: list[bytes]
