"""Break-even, applied to the lookups of a request: the blocks that are worth fetching."""

from typing import NamedTuple

from kv_connector.break_even import BreakEven
from kv_connector.lookup_state import LookupState, Missed
from kv_connector.pool_rows import PoolRows


class Judge(NamedTuple):
    """Applies break-even to the rows of requests. Only the scheduler thread calls it."""

    rows: PoolRows
    break_even: BreakEven

    def is_worth(self, wait: LookupState, keys: list[bytes], *, round_trips: int) -> bool:
        """Whether to fetch `keys`, with so many round trips still to be made."""
        size = self._size_of(keys)
        return wait.prefetch or self.break_even.admits(*size, round_trips=round_trips)

    def without_slow(self, wait: LookupState, readable: list[bytes]) -> list[bytes]:
        """`readable` without the blocks that are in the server's object store, if computing them is
        faster than fetching them: they are misses then."""
        in_bucket = [key for key in readable if key in wait.in_bucket]
        if not in_bucket or wait.bucket_judged:
            return readable
        wait.bucket_judged = True
        if wait.prefetch or self.break_even.admits_bucket(*self._size_of(in_bucket)):
            return readable
        wait.give_up(in_bucket, Missed.BUCKET_SLOW)
        return wait.readable()

    def _size_of(self, keys: list[bytes]) -> tuple[int, int]:
        """In bytes and in tokens."""
        return len(keys) * self.rows.block_bytes, self.rows.tokens_of(len(keys))
