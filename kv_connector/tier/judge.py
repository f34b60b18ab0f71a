"""Break-even, applied to the lookups of a request: the blocks that are worth fetching."""

from collections import Counter
from typing import NamedTuple

from kv_connector.pool.rows import PoolRows
from kv_connector.tier.break_even import BreakEven, Costs
from kv_connector.tier.lookup_state import LookupState, Missed
from remote_server.client import CacheClient
from remote_server.protocol import KeyState

# Most loads are over long before, and those behind them do not notice.
LONG_LOAD_S = 1.0


class Judge(NamedTuple):
    """Applies break-even to the rows of requests. Only the scheduler thread calls it."""

    client: CacheClient
    rows: PoolRows
    break_even: BreakEven

    def is_worth(self, wait: LookupState, keys: list[bytes], *, round_trips: int) -> bool:
        """Whether to fetch `keys`, with so many round trips still to be made. Of several servers
        `without_slow` judges each, so only a query to none but slow ones is not worth it here."""
        if wait.prefetch or wait.is_probe or (self.client.places_by_run and round_trips == 1):
            return True
        costs = self._costs(len(keys), round_trips)
        return any(cost.is_worth for _, cost in costs) or self._is_probe(wait, costs)

    def declines(self, wait: LookupState) -> bool:
        """Whether nothing of this prompt is worth fetching, however few of its blocks the levels
        above lack: then the engine loses no step to a query. Decided once."""
        if not wait.weighed and wait.prompt_tokens and not wait.prefetch:
            wait.weighed = True
            whole = self._costs(self.rows.rows_of(wait.prompt_tokens), 2)
            # Costs grow in a straight line with the number of rows.
            some_are_worth = any(cost.is_worth for _, cost in whole + self._costs(1, 2))
            wait.declined = not some_are_worth and not self._is_probe(wait, whole)
        return wait.declined

    def _costs(self, num_rows: int, round_trips: int) -> list[tuple[str | None, Costs]]:
        """Of so many rows from the server, or from each of several."""
        size = self._size(num_rows)
        names = self.client.names if self.client.places_by_run else (None,)
        return [
            (name, self.break_even.costs(*size, name, round_trips=round_trips)) for name in names
        ]

    def _is_probe(self, wait: LookupState, costs: list[tuple[str | None, Costs]]) -> bool:
        """Whether the request is to measure a server again that was too slow."""
        wait.is_probe = any(self.break_even.is_probe_due(cost, name) for name, cost in costs)
        return wait.is_probe

    def without_slow(self, wait: LookupState, readable: list[bytes]) -> list[bytes]:
        """`readable` without the blocks that are in the server's object store, and without those
        of slow servers among several, if computing them is faster than fetching them: they are
        misses then. Of several servers also without those behind a miss."""
        in_bucket = [key for key in readable if key in wait.in_bucket]
        if in_bucket and not wait.bucket_judged:
            wait.bucket_judged = True
            size = self._size_of(in_bucket)
            if not wait.prefetch and not self.break_even.admits_bucket(*size):
                wait.give_up(in_bucket, Missed.BUCKET_SLOW)
                readable = wait.readable()
        if self.client.places_by_run:
            readable = self._in_prefix(wait, readable)
            if not (wait.judged or wait.prefetch or wait.is_probe):
                readable = self._of_fast_servers(wait, readable)
        return readable

    def is_slow(self, wait: LookupState, readable: list[bytes]) -> bool:
        """Whether the load of `readable` keeps its rows for long: blocks are in the server's object
        store, or one server needs more than `LONG_LOAD_S` for its share."""
        if not wait.in_bucket.isdisjoint(readable):
            return True
        shares: Counter[str | None] = Counter()
        if self.client.places_by_run:
            names = self.client.names
            shares.update(name_of(names, self.client.server_of(key)) for key in readable)
        else:
            shares[None] = len(readable)
        return any(
            self.break_even.seconds_from(name, self._size(num_rows)[0]) > LONG_LOAD_S
            for name, num_rows in shares.items()
        )

    def _of_fast_servers(self, wait: LookupState, readable: list[bytes]) -> list[bytes]:
        """The servers send at the same time, so the share of each is compared with computing all of
        `readable`. Without the share of a slow one less is left to be compared with."""
        by_server: dict[int, list[bytes]] = {}
        for key in readable:
            by_server.setdefault(self.client.server_of(key), []).append(key)
        names, undecided = self.client.names, set(by_server)
        while undecided and readable:
            num_tokens = self._size_of(readable)[1]
            # The slowest share first: others are compared with what is left without it.
            server = max(
                undecided,
                key=lambda number: self.break_even.seconds_from(
                    name_of(names, number), self._size_of(by_server[number])[0]
                ),
            )
            undecided.discard(server)
            num_bytes = self._size_of(by_server[server])[0]
            name = name_of(names, server)
            if not self.break_even.admits_server(name, num_bytes, num_tokens):
                wait.give_up(by_server[server], Missed.BREAK_EVEN)
                readable = self._in_prefix(wait, wait.readable())
        return readable

    def _in_prefix(self, wait: LookupState, readable: list[bytes]) -> list[bytes]:
        """Those of `readable` before the first miss: vLLM uses no block of a prefix behind it.
        With sliding windows or several groups it may use any."""
        if not self.rows.is_one_chain:
            return readable
        found: list[bytes] = []
        for key, state in wait.states.items():
            if isinstance(state, Missed):
                break
            if state is KeyState.READABLE:
                found.append(key)
        return found

    def _size_of(self, keys: list[bytes]) -> tuple[int, int]:
        """In bytes and in tokens."""
        return self._size(len(keys))

    def _size(self, num_rows: int) -> tuple[int, int]:
        return num_rows * self.rows.block_bytes, self.rows.tokens_of(num_rows)


def name_of(names: tuple[str, ...], number: int) -> str:
    """The name of a server, "" when the list has become shorter meanwhile."""
    return names[number] if number < len(names) else ""
