"""The client of a fake server that answers wrongly: rows between guards, and its recovery."""

import time
from collections.abc import Sequence
from contextlib import suppress

from client_helpers import NAMESPACE, PATTERN
from fake_server import PATIENCE_S, SLOT_BYTES, FakeServer, eventually
from shared_messages import SharedGet, SharedPut

from remote_server.client import ClientConfig, GetOutcome, RemoteClient, SharedRegion
from remote_server.errors import KVFerryError
from remote_server.protocol import Get, Lookup, Put

LARGEST = 4096
GUARD = 64
REGION_BYTES = 1 << 20

# One client asks for few blocks at a time here, and the fake has few slots.
KEYS = [b"key %d" % number for number in range(10)]
PROBES = [b"probe %d" % number for number in range(2)]

# Shorter than any real one: a lie may well mean that nothing comes.
SHORT_S = 0.04


class FuzzedClient:
    """A client and its fake server. The rows may be shared memory or may not."""

    def __init__(self) -> None:
        self.fake = FakeServer(near=True)
        self.region = SharedRegion(REGION_BYTES)
        self.heap = memoryview(bytearray(REGION_BYTES))
        self.version = 0
        config = ClientConfig(
            self.fake.endpoint, reconnect_s=0.01, longest_reconnect_s=0.02,
            breaker_backoff_s=0.01, breaker_longest_backoff_s=0.02, hello_timeout_s=SHORT_S,
        )  # fmt: skip
        self.client = RemoteClient(config)
        self.client.register(self.region.view, self.region.fd)
        self.client.declare(NAMESPACE, LARGEST)
        eventually(lambda: self.client.transport == "shm" and self.client.ready, "it is attached")

    def close(self) -> None:
        self.client.close()
        with suppress(BaseException):
            self.fake.close()
        self.region.close()

    # ── rows ─────────────────────────────────────────────────────────────────────────────

    def rows(self, lengths: Sequence[int], *, shared: bool) -> list[memoryview]:
        """Rows with a guard before, between and behind them, in memory that is all `PATTERN`."""
        memory = self.region.view if shared else self.heap
        at, rows = GUARD, []
        for length in lengths:
            rows.append(memory[at : at + length])
            at += length + GUARD
        memory[: at + SLOT_BYTES] = bytes([PATTERN]) * (at + SLOT_BYTES)
        return rows

    def assert_guards_stand(self, lengths: Sequence[int], *, shared: bool) -> None:
        memory = self.region.view if shared else self.heap
        guard, at = bytes([PATTERN]) * GUARD, 0
        for length in lengths:
            assert memory[at : at + GUARD] == guard, "bytes before a row were written"
            at += GUARD + length
        beyond = bytes([PATTERN]) * SLOT_BYTES
        assert memory[at : at + SLOT_BYTES] == beyond, "bytes behind the last row were written"

    def hold(self, lengths: dict[bytes, int]) -> dict[bytes, bytes]:
        """Let the server have these keys only, each with bytes that it never had before."""
        self.version += 1
        blocks = {
            key: (b"%d/" % self.version + key + b" ") * (length // 4 + 1)
            for key, length in lengths.items()
        }
        blocks = {key: blocks[key][:length] for key, length in lengths.items()}
        self.fake.do(lambda: (self.fake.blocks.clear(), self.fake.hold(NAMESPACE, blocks)))
        return blocks

    # ── living on ────────────────────────────────────────────────────────────────────────

    def assert_all_is_well(self) -> None:
        """With an honest server everything works again by itself, on every channel.

        Answers come in the order they were sent, so all earlier ones have been received by then.
        """
        self.fake.behave()
        self.client.declare(f"again {self.version}", LARGEST)  # a welcome, to be believed
        deadline = time.monotonic() + PATIENCE_S
        while not self._works():
            assert time.monotonic() < deadline, f"it does not recover: {self.client.counters()}"
        self.client.forget(f"again {self.version}")
        assert self.fake.failure is None
        self.client.check(PATIENCE_S)
        assert self.client.counters()["internal_errors"] == 0

    def _works(self) -> bool:
        fake, client = self.fake, self.client
        asked = [len(fake.all_asked(kind)) for kind in (Lookup, Get, Put, SharedGet, SharedPut)]
        try:
            if not client.ready or client.transport != "shm":
                time.sleep(0.001)
                return False
            for memory in (self.heap, self.region.view):
                rows = [memory[-512:-256], memory[-256:]]
                for number, row in enumerate(rows):
                    row[:] = bytes([number]) * 256
                put = client.put(NAMESPACE, PROBES, rows, timeout_s=PATIENCE_S).result()
                if put.total != 2:
                    return False
                for row in rows:
                    row[:] = bytes(256)
                got = client.get(
                    NAMESPACE, PROBES, rows, stall_s=PATIENCE_S, timeout_s=PATIENCE_S
                ).result()
                if got.outcomes != [GetOutcome.HIT] * 2:
                    return False
                assert [row[0] for row in rows] == [0, 1]
            if client.lookup(NAMESPACE, PROBES, timeout_s=PATIENCE_S).result().prefix != 2:
                return False
        except KVFerryError:
            return False
        now = [len(fake.all_asked(kind)) for kind in (Lookup, Get, Put, SharedGet, SharedPut)]
        fake.asked.clear()
        return all(after > before for before, after in zip(asked, now, strict=True))
