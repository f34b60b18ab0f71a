"""A thief of lane tokens: it uses those of others, twice, late, or made up.

It may win the race for a token that it has seen, and holds a lane then, on which it sends nonsense.
The server gives at most one lane for a token, none for one that is late, and none for any other.
"""

import contextlib
import random
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence

from fault_proxy import FaultProxy
from lane_wire import GREETING_BYTES, HEADER, Announced
from proxy_pipe import address_of, reset

from remote_server.protocol import LANE_TOKEN_BYTES, LANE_TOKEN_S

_PREAMBLE = b"KVFL" + (1).to_bytes(4, "little")
_PATIENCE_S = 0.3
_EVERY_S = 0.05
"""Rarely enough that clients have lanes most of the time."""
_MOST_HELD = 8
_LATE_S = LANE_TOKEN_S + 1.0


class TokenThief:
    """`run` is a thread. AssertionError when the server takes a token that it must not take."""

    def __init__(self, seed: object, proxies: Sequence[FaultProxy]) -> None:
        self.done: Counter[str] = Counter()
        self._rng = random.Random(f"{seed}/thief")
        self._proxies = proxies
        self._seen: deque[tuple[float, tuple[str, int], bytes]] = deque()
        """Tokens that have been announced, with the times; they are late one day."""
        self._held: deque[socket.socket] = deque()

    def run(self, over: threading.Event) -> None:
        try:
            while not over.wait(self._rng.uniform(0, 2 * _EVERY_S)):
                proxy = self._rng.choice(self._proxies)
                self._look(proxy)
                with contextlib.suppress(OSError):  # the server is away, or ended the lane
                    self._act(proxy)
                while len(self._held) > self._rng.randrange(_MOST_HELD):
                    self._let_go(self._held.popleft())
        finally:
            for one in self._held:
                one.close()

    def _look(self, proxy: FaultProxy) -> None:
        while proxy.announced:
            one = proxy.announced.popleft()
            self._seen.append((time.monotonic(), _address(proxy, one), one.token))

    def _act(self, proxy: FaultProxy) -> None:
        if not self._seen:
            return
        match self._rng.choice(("steal", "twice", "forge", "half", "late")):
            case "steal":
                _, address, token = self._seen[-1]
                self.done["token stolen"] += self._enter(address, token)
            case "twice":
                _, address, token = self._seen[-1]
                both = [self._enter(address, token) for _ in range(2)]
                assert sum(both) < 2, "a token was good twice"
                self.done["token repeated"] += 1
            case "forge":
                address = self._seen[-1][1]
                assert not self._enter(address, self._rng.randbytes(LANE_TOKEN_BYTES)), "forged"
                self.done["token forged"] += 1
            case "half":
                _, address, token = self._seen[-1]
                one = socket.create_connection(address, _PATIENCE_S)
                self._held.append(one)
                one.sendall((_PREAMBLE + token)[: self._rng.randrange(8 + LANE_TOKEN_BYTES)])
                self.done["half a preamble"] += 1
            case "late" if time.monotonic() - self._seen[0][0] > _LATE_S:
                _, address, token = self._seen.popleft()
                assert not self._enter(address, token), "a late token was good"
                self.done["token late"] += 1

    def _enter(self, address: tuple[str, int], token: bytes) -> bool:
        """Whether the server opens a lane for this token. It is held for a while then."""
        one = socket.create_connection(address, _PATIENCE_S)
        one.sendall(_PREAMBLE + token)
        try:
            answer = one.recv(GREETING_BYTES)
            greeted = len(answer) == GREETING_BYTES and any(answer[4:])  # the lane's number
        except OSError:
            greeted = False
        if greeted:
            self._held.append(one)
        else:
            one.close()
        return greeted

    def _let_go(self, one: socket.socket) -> None:
        """Leave, perhaps with nonsense."""
        with contextlib.suppress(OSError):
            match self._rng.randrange(4):
                case 0:
                    one.sendall(HEADER.pack(self._rng.randrange(1 << 20), 0, 40) + bytes(48))
                case 1:
                    one.sendall(self._rng.randbytes(100))
                case 2:
                    reset(one)
        one.close()


def _address(proxy: FaultProxy, announced: Announced) -> tuple[str, int]:
    return announced.host or address_of(proxy.target)[0], announced.port
