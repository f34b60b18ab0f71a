"""Eight connections that keep a server busy, in a process of their own; written from PROTOCOL.md.

    python crowd.py ENDPOINT

Reads lines like `touch 64`: from then on each connection has 16,384 keys of such requests under
way, 64 in each request. Prints "ready" when every connection has been answered once.
"""

import sys
from itertools import islice

import msgspec
import zmq

NUM_CONNECTIONS = 8
NUM_KEYS = 16_384
BLOCK_BYTES = 256
NAMESPACE = "crowd"
KEYS = [b"crowd-%030d" % number for number in range(NUM_KEYS)]


def frames_of(kind: str, **fields: object) -> list[bytes]:
    return [b"KVF1", msgspec.msgpack.encode({"type": kind, **fields})]


def header_of(message: list[bytes]) -> dict[str, object]:
    header: dict[str, object] = msgspec.msgpack.decode(message[1])
    return header


def store_all(peer: "zmq.Socket[bytes]") -> None:
    """Every key is readable when this returns."""
    hello = {"protocol": 2, "namespace": NAMESPACE, "block_bytes": BLOCK_BYTES}
    ask(peer, frames_of("hello", request_id=1, **hello))
    put = frames_of(
        "put", request_id=2, namespace=NAMESPACE, keys=KEYS, lengths=[BLOCK_BYTES] * NUM_KEYS,
        checksums=[], blocks_per_frame=NUM_KEYS, deferred=False,
    )  # fmt: skip
    stored = ask(peer, [*put, bytes(BLOCK_BYTES * NUM_KEYS)])
    assert stored["total"] == NUM_KEYS, stored


def ask(peer: "zmq.Socket[bytes]", frames: list[bytes]) -> dict[str, object]:
    peer.send_multipart(frames)
    return header_of(peer.recv_multipart())


class Crowd:
    def __init__(self, endpoint: str) -> None:
        context = zmq.Context.instance()
        self._peers = [context.socket(zmq.DEALER) for _ in range(NUM_CONNECTIONS)]
        self._poller = zmq.Poller()
        for peer in self._peers:
            peer.rcvhwm = 0
            peer.connect(endpoint)
            self._poller.register(peer, zmq.POLLIN)
        store_all(self._peers[0])
        self._kind = ""
        self._requests: list[list[bytes]] = []

    def be(self, kind: str, keys_each: int) -> None:
        """Ask for this from now on."""
        self._drain()
        self._kind = kind
        runs = [KEYS[first : first + keys_each] for first in range(0, NUM_KEYS, keys_each)]
        self._requests = [
            frames_of(kind, request_id=number + 10, namespace=NAMESPACE, keys=run)
            for number, run in enumerate(runs)
        ]
        for peer in self._peers:
            for request in self._requests:
                peer.send_multipart(request)
        waiting = {*self._peers}
        while waiting:
            waiting -= self.go_on()

    def go_on(self, timeout_ms: int = 1000) -> set["zmq.Socket[bytes]"]:
        """Ask again for what has been answered; by whom."""
        answered = set()
        for peer, _ in self._poller.poll(timeout_ms):
            if isinstance(peer, int):
                continue
            for number in islice(self._ended(peer), 256):
                peer.send_multipart(self._requests[number - 10])
                answered.add(peer)
        return answered

    def _ended(self, peer: "zmq.Socket[bytes]"):
        while peer.poll(0):
            header = header_of(peer.recv_multipart())
            assert header["type"] != "error", header
            follows = header["type"] == "got" and header["found"]
            if not follows and not header.get("more", False):
                yield header["request_id"]

    def _drain(self) -> None:
        left = len(self._requests) * NUM_CONNECTIONS
        while left:
            for peer, _ in self._poller.poll(1000):
                left -= sum(1 for _ in self._ended(peer))


def main() -> None:
    crowd = Crowd(sys.argv[1])
    poller = zmq.Poller()
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    print("ready", flush=True)
    busy = False
    while True:
        if poller.poll(0 if busy else 1000):
            line = sys.stdin.readline().split()
            if not line:
                return
            crowd.be(line[0], int(line[1]))
            busy = True
            print("ready", flush=True)
        if busy:
            crowd.go_on(100)


if __name__ == "__main__":
    main()
