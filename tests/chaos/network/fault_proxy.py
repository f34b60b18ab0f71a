"""A TCP proxy between clients and a server, whose faults a test switches at any time.

One thread moves everything. It cuts each direction of each connection into ZMTP units
(`zmtp.py`), so that a fault hits whole messages, or a chosen place within one. Lanes pass through
it too, by a port of its own that it announces in place of the server's; their units are blocks
(`lane_wire.py`):

    with FaultProxy(server.endpoint, seed=7) as proxy:
        proxy.set(Faults(latency_s=0.2))               # the weather, for all connections
        caught = proxy.catch(TO_CLIENT, "blocks", fraction=0.5)
        future = client.get(...)
        caught.wait()                                  # half of that message has been sent
        server.kill()
        caught.release(deliver=False)

What is random is drawn from `seed`; which messages it meets is up to the programs.
"""

import contextlib
import random
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from math import inf
from typing import Self

from faults import CLEAR, TO_CLIENT, TO_SERVER, Direction, Faults, Shot
from lane_wire import GREETING_BYTES, PREAMBLE_BYTES, Announced, LaneParser, moved
from proxy_pipe import PATIENCE_S, Catch, Pipe, address_of, listening, port_of, reset
from tampering import CARRIERS, CUT, Cut, Tamper
from zmtp import Kind, Parser, Unit

# Read from one connection before the others get their turn.
_READ_BYTES = 256 << 10

# What a slow link sends at a time.
_PIECE_BYTES = 64 << 10


class FaultProxy:
    """Listens on `endpoint` and forwards to `target`, which may change at any time."""

    def __init__(self, target: str, seed: int = 0) -> None:
        self.target = target
        self.counts: Counter[str] = Counter()
        """What was done to how many units, by the name of the function that did it."""
        self._rng = random.Random(seed)
        self._listener, self._lane_listener = listening(), listening()
        self.endpoint = f"tcp://127.0.0.1:{port_of(self._listener)}"
        self.announced: deque[Announced] = deque(maxlen=64)
        """The lanes that servers have announced last, oldest first. A test may take them out."""
        self._lanes_at = Announced("", 0, b"")
        """Where the server awaits lanes now."""
        self._faults = CLEAR
        self._catches: list[Catch] = []
        self._shots: list[Shot] = []
        self._calls: deque[Callable[[], None]] = deque()
        self._closing = False
        self._pipes: dict[socket.socket, Pipe] = {}  # by the socket each reads from
        self._registered: dict[socket.socket, int] = {}
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wake = socket.socketpair()
        self._wakeup.setblocking(False)
        self._wake.setblocking(False)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        for listener in (self._listener, self._lane_listener):
            self._selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)
        self._thread.start()

    # ── called by tests ──────────────────────────────────────────────────────────────────

    def set(self, faults: Faults) -> None:
        """From now on, and until the next call. What was frozen goes on."""

        def change() -> None:
            self._faults = faults
            if faults.refuse:
                self._reset_all()

        self._call(change)

    def clear(self) -> None:
        """Everything passes, unharmed."""
        self.set(CLEAR)

    def reset_connections(self) -> None:
        """End every connection as a broken network does."""
        self._call(self._reset_all)

    def catch(
        self, direction: Direction, *types: str, fraction: float = 0.0, skip: int = 0
    ) -> Catch:
        """Catch the first message called one of `types`, or the one after `skip` of them."""
        caught = Catch(direction, types, fraction, skip, self._let_go)
        self._call(lambda: self._catches.append(caught))
        return caught

    def shoot(self, direction: Direction, tamper: Tamper, type: str | None = None) -> Shot:
        """Apply `tamper` to one message: the next in this direction that it applies to."""
        shot = Shot(direction, tamper, type)
        self._call(lambda: self._shots.append(shot))
        return shot

    def stand_down(self) -> None:
        """Forget shots that have hit nothing."""
        self._call(self._shots.clear)

    @property
    def _lane_port(self) -> int:
        return port_of(self._lane_listener)

    @property
    def num_connections(self) -> int:
        """Lanes included."""
        return len(self._pipes) // 2

    @property
    def waiting_bytes(self) -> int:
        """Those that were read and not yet sent on: they are slow, or no peer takes them."""
        return sum(pipe.queued_bytes for pipe in [*self._pipes.values()])

    def close(self) -> None:
        """End every connection and the thread. Safe to repeat."""
        self._closing = True
        self._poke()
        self._thread.join(PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ── the thread ───────────────────────────────────────────────────────────────────────

    def _call(self, run: Callable[[], None]) -> None:
        """Have `run` done by the thread, and return when it has been."""
        done = threading.Event()
        self._calls.append(lambda: (run(), done.set()))
        self._poke()
        assert done.wait(PATIENCE_S) or self._closing, "the proxy's thread is gone"

    def _poke(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    def _run(self) -> None:
        while not self._closing:
            events = self._selector.select(self._look_around())
            for key, mask in events:
                if key.fileobj is self._wakeup:
                    with contextlib.suppress(BlockingIOError):
                        self._wakeup.recv(4096)
                elif key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._lane_listener:
                    self._accept_lane()
                elif key.fileobj in self._pipes:
                    if mask & selectors.EVENT_READ:
                        self._read(self._pipes[key.fileobj])
                    if key.fileobj in self._pipes and mask & selectors.EVENT_WRITE:
                        self._write(self._pipes[key.fileobj].twin)
            while self._calls:
                self._calls.popleft()()
        self._reset_all()
        self._selector.close()
        for one in (self._listener, self._lane_listener, self._wakeup, self._wake):
            one.close()

    def _look_around(self) -> float | None:
        """Register what may move now; returns how long until more may."""
        now, next_due = time.monotonic(), inf
        wanted = dict.fromkeys(self._pipes, 0)
        for source, pipe in self._pipes.items():
            if pipe.direction in self._faults.frozen or pipe.held:
                continue
            if pipe.has_room:
                wanted[source] |= selectors.EVENT_READ
            if pipe.queue:
                if pipe.queue[0][0] <= now:
                    wanted[pipe.sink] |= selectors.EVENT_WRITE
                else:
                    next_due = min(next_due, pipe.queue[0][0])
        for one, mask in wanted.items():
            if mask != self._registered.get(one, 0):
                self._register(one, mask)
        return None if next_due == inf else max(0.0, next_due - now)

    def _register(self, one: socket.socket, mask: int) -> None:
        if not mask:
            self._selector.unregister(one)
        elif self._registered.get(one):
            self._selector.modify(one, mask)
        else:
            self._selector.register(one, mask)
        self._registered[one] = mask

    # ── connections ──────────────────────────────────────────────────────────────────────

    def _accept(self) -> None:
        self._join(self._listener, *address_of(self.target), Parser(), Parser())

    def _accept_lane(self) -> None:
        host, port, _ = self._lanes_at
        self.counts["lanes"] += self._join(
            self._lane_listener, host or address_of(self.target)[0], port,
            LaneParser(PREAMBLE_BYTES), LaneParser(GREETING_BYTES),
        )  # fmt: skip

    def _join(
        self, listener: socket.socket, host: str, port: int,
        there: Parser | LaneParser, back: Parser | LaneParser,
    ) -> bool:  # fmt: skip
        """Connect the next connection of `listener` with the server. False: it is refused."""
        try:
            client, _ = listener.accept()
        except OSError:
            return False
        if self._faults.refuse:
            self.counts["refused"] += 1
            reset(client)
            return False
        try:
            server = socket.create_connection((host, port), timeout=PATIENCE_S)
        except OSError:
            reset(client)
            return False
        for one in (client, server):
            one.setblocking(False)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        to_server = Pipe(client, server, TO_SERVER, there)
        to_client = Pipe(server, client, TO_CLIENT, back)
        to_server.twin, to_client.twin = to_client, to_server
        self._pipes[client], self._pipes[server] = to_server, to_client
        return True

    def _end(self, pipe: Pipe, *, broken: bool = False) -> None:
        """Both directions of its connection are over."""
        for one in (pipe.source, pipe.sink):
            if self._pipes.pop(one, None) is None:
                continue
            if self._registered.pop(one, 0):
                self._selector.unregister(one)
            if broken:
                reset(one)
            one.close()

    def _reset_all(self) -> None:
        for pipe in list(self._pipes.values()):
            self._end(pipe, broken=True)

    # ── bytes ────────────────────────────────────────────────────────────────────────────

    def _read(self, pipe: Pipe) -> None:
        try:
            data = pipe.source.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            pipe.ended = True
            self._end_when_empty(pipe)
            return
        for unit in pipe.parser.feed(data):
            if pipe.direction is TO_CLIENT and (announced := moved(unit, self._lane_port)):
                unit, self._lanes_at = announced
                self.announced.append(self._lanes_at)
            if pipe.held:
                assert self._of(pipe) is not None
                self._of(pipe).rest += unit.raw  # it waits behind what was caught
            else:
                self._pass_on(pipe, unit)
        if pipe.queue and not pipe.held:
            self._write(pipe)  # most of it is due, and the sink has room

    def _of(self, pipe: Pipe) -> Catch:
        return next(one for one in self._catches if one.pipe is pipe)

    def _pass_on(self, pipe: Pipe, unit: Unit) -> None:
        if pipe.direction in self._faults.swallowed and unit.kind is not Kind.GREETING:
            self.counts["swallowed"] += 1
            return
        for caught in self._catches:
            if self._catches_it(caught, pipe, unit):
                return
        for piece in self._tampered(pipe, unit):
            self._queue(pipe, piece)

    def _catches_it(self, caught: Catch, pipe: Pipe, unit: Unit) -> bool:
        wanted = caught.pipe is None and caught.direction is pipe.direction
        if not wanted or unit.type not in caught.types:
            return False
        if caught.skip:
            caught.skip -= 1
            return False
        passed = int(len(unit.raw) * caught.fraction)
        with contextlib.suppress(OSError):
            # At once, and whatever the weather: who waits for the catch relies on it.
            pipe.sink.setblocking(True)
            self._flush(pipe)
            pipe.sink.sendall(unit.raw[:passed])
            pipe.sink.setblocking(False)
        caught.pipe, caught.rest = pipe, unit.raw[passed:]
        pipe.held = True
        caught.event.set()
        return True

    def _flush(self, pipe: Pipe) -> None:
        while pipe.queue:
            piece = pipe.queue.popleft()[1]
            if isinstance(piece, memoryview):
                pipe.sink.sendall(piece)
        pipe.queued_bytes = 0

    def _let_go(self, caught: Catch, deliver: bool) -> None:
        def go_on() -> None:
            self._catches.remove(caught)
            pipe = caught.pipe
            if pipe is None or pipe.source not in self._pipes:
                return
            pipe.held = False
            if deliver:
                self._queue(pipe, caught.rest)
                self._end_when_empty(pipe)
            else:
                self._end(pipe, broken=True)

        self._call(go_on)

    def _tampered(self, pipe: Pipe, unit: Unit) -> list[bytes | Cut]:
        for shot in self._shots:
            if shot.direction is not pipe.direction or shot.type not in (None, unit.type):
                continue
            output = shot.tamper(self._rng, unit) if unit.kind in CARRIERS else None
            if output is not None:
                self._shots.remove(shot)
                shot.met = unit.type
                shot.hit.set()
                return output
        tamper = self._faults.tamper
        where = self._faults.tampered
        if tamper and pipe.direction in where and self._rng.random() < self._faults.share:
            output = tamper(self._rng, unit)
            if output is not None:
                self.counts[getattr(tamper, "__name__", type(tamper).__name__)] += 1
                return output
        return [unit.raw]

    def _queue(self, pipe: Pipe, data: bytes | Cut) -> None:
        faults, now = self._faults, time.monotonic()
        if isinstance(data, Cut):
            pipe.queue.append((max(now, pipe.last_due), CUT))
            return
        slow = faults.bytes_per_s < inf
        step = _PIECE_BYTES if slow else max(1, len(data))
        view = memoryview(data)
        for start in range(0, len(data), step):
            piece = view[start : start + step]
            due = max(now + faults.latency_s, pipe.last_due)
            if slow:
                due = max(due, now) + piece.nbytes / faults.bytes_per_s
            pipe.last_due = due
            pipe.queue.append((due, piece))
            pipe.queued_bytes += piece.nbytes

    def _write(self, pipe: Pipe) -> None:
        now = time.monotonic()
        while pipe.queue and pipe.queue[0][0] <= now:
            due, piece = pipe.queue[0]
            if isinstance(piece, Cut):
                self._end(pipe, broken=True)
                return
            try:
                sent = pipe.sink.send(piece)
            except BlockingIOError:
                return
            except OSError:
                self._end(pipe)
                return
            pipe.queued_bytes -= sent
            if sent < piece.nbytes:
                pipe.queue[0] = (due, piece[sent:])
                return
            pipe.queue.popleft()
        self._end_when_empty(pipe)

    def _end_when_empty(self, pipe: Pipe) -> None:
        """The other side learns that a sender has left after all bytes that it sent."""
        if pipe.ended and not pipe.queue and not pipe.held:
            self._end(pipe)
