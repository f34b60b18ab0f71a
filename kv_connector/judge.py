"""Break-even, applied to the lookups of a request: the blocks that are worth fetching."""

from typing import NamedTuple

from kv_connector.break_even import BreakEven
from kv_connector.lookup_state import LookupState, Missed
from kv_connector.pool_rows import PoolRows
from remote_server.client import CacheClient
from remote_server.protocol import KeyState


class Judge(NamedTuple):
    """Applies break-even to the rows of requests. Only the scheduler thread calls it."""

    client: CacheClient
    rows: PoolRows
    break_even: BreakEven

    def is_worth(self, wait: LookupState, keys: list[bytes], *, round_trips: int) -> bool:
        """Whether to fetch `keys`, with so many round trips still to be made. Of several servers
        `without_slow` judges each, so only a query to none but slow ones is not worth it here."""
        if wait.prefetch:
            return True
        size = self._size_of(keys)
        if not self.client.places_by_run:
            return self.break_even.admits(*size, round_trips=round_trips)
        return round_trips == 1 or any(
            self.break_even.admits_server(name, *size, round_trips=round_trips)
            for name in self.client.names
        )

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
            if not wait.judged and not wait.prefetch:
                readable = self._of_fast_servers(wait, readable)
        return readable

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
            if not self.break_even.admits_server(name, num_bytes, num_tokens, round_trips=1):
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
        return len(keys) * self.rows.block_bytes, self.rows.tokens_of(len(keys))


def name_of(names: tuple[str, ...], number: int) -> str:
    """The name of a server, "" when the list has become shorter meanwhile."""
    return names[number] if number < len(names) else ""
