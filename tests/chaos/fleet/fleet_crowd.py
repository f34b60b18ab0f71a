"""Many fake engines on one fleet, for a process of their own; written from PROTOCOL.md.

Each has a plain TCP connection to each server and speaks ZMTP on it (`zmtp.py`). Lookups are each
of a whole prompt at both homes of its runs, by one engine after the other. Meanwhile engines leave
without a word, and others come.
"""

import selectors
import socket
import struct
import time
from collections import Counter
from contextlib import suppress

import msgspec
from fleet_client import PROMPTS, anchor_of, rows_of
from oracle import key
from zmtp import Kind, Parser, Unit, command_of, connected, message_of

from remote_server.fleet.placement import homes
from remote_server.protocol import PROTOCOL_VERSION, KeyState

NUM_PROMPTS = 64
AT_ONCE = 25
"""Engines that connect at a time: fewer than wait in a listening socket."""

HANG_GUARD_S = 60.0

_PING, _PONG = b"\x04PING", b"\x04PONG"


def header_of(unit: Unit) -> dict[str, object]:
    header: dict[str, object] = msgspec.msgpack.decode(unit.bodies[1])
    return header


class Peer:
    """One connection of one engine."""

    def __init__(self, engine: "Engine", server: int, endpoint: str) -> None:
        self.engine, self.server = engine, server
        self.socket = connected(endpoint)
        self.parser = Parser()

    def send(self, **fields: object) -> None:
        self.socket.sendall(message_of([b"KVF1", msgspec.msgpack.encode(fields)]))

    def receive(self) -> list[Unit]:
        """The units that have come; none once the server has closed the connection."""
        units = self.parser.feed(self.socket.recv(1 << 16))
        for unit in units:
            if unit.kind is Kind.COMMAND and (at := unit.raw.find(_PING)) > 0:
                self.socket.sendall(command_of(_PONG + unit.raw[at + len(_PING) + 2 :]))
        return units


class Engine:
    """A connection to each server, and at most one lookup under way."""

    def __init__(self, crowd: "Crowd") -> None:
        self.peers = [Peer(self, at, one) for at, one in enumerate(crowd.endpoints)]
        self.num_welcome = 0
        self.awaits = 0
        self.began = 0.0
        self.missing: set[int] = set()
        self.asked: dict[int, list[int]] = {}


class Crowd:
    def __init__(self, number: int, servers: dict[str, str]) -> None:
        self.names, self.endpoints = [*servers], [*servers.values()]
        self._selector = selectors.DefaultSelector()
        self._counts: Counter[str] = Counter()
        self._took: list[float] = []
        self._plans = [self._plan(prompt) for prompt in range(NUM_PROMPTS)]
        self._engines: list[Engine] = []
        while len(self._engines) < number:
            self._come(min(AT_ONCE, number - len(self._engines)))

    def _plan(self, prompt: int) -> dict[int, list[int]]:
        """The rows that each server is asked for: it is one of the two homes of their runs."""
        plan: dict[int, list[int]] = {}
        for row in rows_of(prompt):
            for server in set(homes(self.names, PROMPTS.name, key(PROMPTS, anchor_of(row)))):
                plan.setdefault(server, []).append(row)
        return plan

    # ── engines come and go ──────────────────────────────────────────────────────────────

    def _come(self, number: int) -> None:
        new = [Engine(self) for _ in range(number)]
        for engine in new:
            for peer in engine.peers:
                self._selector.register(peer.socket, selectors.EVENT_READ, peer)
        deadline = time.monotonic() + HANG_GUARD_S
        while any(engine.num_welcome < len(self.names) for engine in new):
            assert time.monotonic() < deadline, "a server does not welcome a new engine"
            self._turn(0.1)
        self._engines += new

    def _leave(self, engine: Engine) -> None:
        self._engines.remove(engine)
        for peer in engine.peers:
            self._selector.unregister(peer.socket)
            peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peer.socket.close()

    def close(self) -> None:
        """All leave."""
        for engine in [*self._engines]:
            self._leave(engine)

    def _greeted(self, peer: Peer) -> None:
        peer.send(
            type="hello", protocol=PROTOCOL_VERSION, request_id=1, namespace=PROMPTS.name,
            block_bytes=PROMPTS.block_bytes, server=self.names[peer.server], fleet="0" * 16,
        )  # fmt: skip

    # ── lookups ──────────────────────────────────────────────────────────────────────────

    def go(self, seconds: float, rate: float, churn: float) -> dict[str, object]:
        """`rate` lookups and `churn` other engines a second. Returns what became of the lookups,
        with times in milliseconds."""
        self._counts.clear()
        self._took.clear()
        began = time.monotonic()
        asked = replaced = 0
        while (passed := time.monotonic() - began) < seconds:
            while asked < passed * rate:
                self._ask(self._engines[asked % len(self._engines)], asked % NUM_PROMPTS)
                asked += 1
            if replaced < int(passed * churn):
                replaced += 1
                self._leave(next(one for one in self._engines if not one.awaits))
                self._come(1)
            due = [asked / rate, (replaced + 1) / churn if churn else seconds, seconds]
            self._turn(max(0.0, began + min(due) - time.monotonic()))
        deadline = time.monotonic() + HANG_GUARD_S
        while any(engine.awaits for engine in self._engines) and time.monotonic() < deadline:
            self._turn(0.1)
        self._counts["unanswered"] = sum(bool(engine.awaits) for engine in self._engines)
        took = sorted(self._took)
        at = {name: took[int(part * (len(took) - 1))] * 1e3 for name, part in _PARTS.items()}
        return {**self._counts, **at, "asked": asked, "replaced": replaced}

    def _ask(self, engine: Engine, prompt: int) -> None:
        if engine.awaits:
            self._counts["skipped"] += 1
            return
        engine.asked = self._plans[prompt]
        engine.missing = {*rows_of(prompt)}
        engine.awaits, engine.began = len(engine.asked), time.perf_counter()
        for server, rows in engine.asked.items():
            engine.peers[server].send(
                type="lookup", request_id=2, namespace=PROMPTS.name, fleet=True,
                keys=[key(PROMPTS, row) for row in rows],
            )  # fmt: skip

    def _turn(self, timeout_s: float) -> None:
        for ready, _ in self._selector.select(timeout_s):
            peer: Peer = ready.data
            with suppress(ConnectionError):
                for unit in peer.receive():
                    self._take(peer, unit)
                continue
            raise AssertionError(f"{self.names[peer.server]} has closed a connection")

    def _take(self, peer: Peer, unit: Unit) -> None:
        if unit.kind is Kind.COMMAND and b"READY" in unit.raw[:10]:
            self._greeted(peer)
        if unit.kind is not Kind.MESSAGE:
            return
        reply, engine = header_of(unit), peer.engine
        if reply["type"] == "welcome":
            engine.num_welcome += 1
        elif reply["type"] == "found":
            states = reply["states"]
            assert isinstance(states, bytes)
            pairs = zip(engine.asked[peer.server], states, strict=True)
            engine.missing -= {row for row, state in pairs if state == KeyState.READABLE}
            self._counts["with load"] += reply.get("load") is not None
            engine.awaits -= 1
            if not engine.awaits:
                self._took.append(time.perf_counter() - engine.began)
                self._counts["complete" if not engine.missing else "with misses"] += 1
        else:
            raise AssertionError(f"a server replied {reply}")


_PARTS = {"p50": 0.5, "p99": 0.99, "longest": 1.0}
