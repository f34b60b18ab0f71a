"""A client in plain Python: messages over ZeroMQ, blocks over a lane. It uses nothing of kvferry.

    python -m examples.lane_client tcp://127.0.0.1:5757

It puts three blocks, gets them back, and prints their sizes. remote_server/PROTOCOL.md describes
what it sends. Without lanes, for example from a server with keys, it ends with an error.
"""

import argparse
import socket
import struct
from collections.abc import Sequence
from typing import Any

import msgpack
import xxhash
import zmq

BLOCK = struct.Struct("<QII")  # request, position in its message, length; a checksum follows


class LaneClient:
    """One ZeroMQ connection and one lane. One request at a time."""

    def __init__(self, endpoint: str, namespace: str, block_bytes: int) -> None:
        """Raises `RuntimeError` for what the server refuses, as all methods do."""
        self.namespace = namespace
        self._requests = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.linger = self._dealer.rcvhwm = 0
        self._dealer.rcvtimeo = 10_000
        self._dealer.connect(endpoint)
        self._ask("hello", protocol=2, namespace=namespace, block_bytes=block_bytes)
        opened = self._ask("open_lane")
        host = opened.get("host") or endpoint.removeprefix("tcp://").rpartition(":")[0]
        self._lane = socket.create_connection((host, opened["port"]), timeout=10)
        self._lane.sendall(struct.pack("<4sI", b"KVFL", 1) + opened["token"])
        if self._receive(8) != struct.pack("<4sI", b"KVFL", opened["number"]):
            raise RuntimeError("another server listens there")
        self.lane = opened["number"]

    def put(self, blocks: dict[bytes, bytes]) -> int:
        """Returns how many blocks are new. They are readable then."""
        lengths = [len(block) for block in blocks.values()]
        request_id = self._send(
            "put", namespace=self.namespace, keys=[*blocks], lengths=lengths, checksums=[],
            lane=self.lane, deferred=False,
        )  # fmt: skip
        for position, (key, block) in enumerate(blocks.items()):
            trailer = struct.pack("<Q", self.checksum(key, block))
            self._lane.sendall(BLOCK.pack(request_id, position, len(block)) + block + trailer)
        return int(self._reply()["created"])

    def get(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """The blocks that the server has, each checked."""
        request_id = self._send("get", namespace=self.namespace, keys=[*keys], lane=self.lane)
        blocks: dict[bytes, bytes] = {}
        more = bool(self._reply()["found"])
        while more:
            message = self._reply()
            for position, index in enumerate(message["indices"]):
                length = message["lengths"][position]
                if self._receive(BLOCK.size) != BLOCK.pack(request_id, position, length):
                    raise RuntimeError("the lane brought another block")
                block, trailer = self._receive(length), self._receive(8)
                if struct.unpack("<Q", trailer)[0] == self.checksum(keys[index], block):
                    blocks[keys[index]] = block
            more = message["more"]
        return blocks

    def checksum(self, key: bytes, block: bytes) -> int:
        identity = xxhash.xxh3_64_intdigest(self.namespace.encode() + b"\0" + key)
        return xxhash.xxh3_64_intdigest(block, seed=identity)

    def close(self) -> None:
        self._lane.close()
        self._context.destroy(linger=0)

    def _send(self, kind: str, **fields: Any) -> int:
        self._requests += 1
        header = msgpack.packb({"type": kind, "request_id": self._requests, **fields})
        self._dealer.send_multipart([b"KVF1", header])
        return self._requests

    def _reply(self) -> dict[str, Any]:
        _, header = self._dealer.recv_multipart()
        reply: dict[str, Any] = msgpack.unpackb(header)
        if reply["type"] == "error":
            raise RuntimeError(f"{reply['code']}: {reply['message']}")
        return reply

    def _ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._send(kind, **fields)
        return self._reply()

    def _receive(self, num_bytes: int) -> bytes:
        pieces = bytearray()
        while len(pieces) < num_bytes:
            piece = self._lane.recv(num_bytes - len(pieces))
            if not piece:
                raise RuntimeError("the server closed the lane")
            pieces += piece
        return bytes(pieces)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.lane_client", description=__doc__)
    parser.add_argument("endpoint", nargs="?", default="tcp://127.0.0.1:5757")
    client = LaneClient(parser.parse_args(argv).endpoint, "lane example", 1 << 20)
    blocks = {b"key-%d" % number: bytes([number]) * (1000 << number) for number in range(3)}
    print(f"{client.put(blocks)} blocks are new")
    came = client.get([*blocks, b"another key"])
    if came != blocks:
        raise RuntimeError("other blocks came back")
    print("came back:", *(f"{key.decode()} ({len(block)} bytes)" for key, block in came.items()))
    client.close()


if __name__ == "__main__":
    main()
