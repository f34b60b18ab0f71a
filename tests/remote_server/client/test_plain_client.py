"""A client written from PROTOCOL.md alone: the `msgpack` package and a ZeroMQ socket.

Nothing of `remote_server` writes, reads or hashes here; the server is a process.
"""

import msgpack
import pytest
import xxhash
import zmq
from server_process import ServerProcess
from wire_peer import Peer

from examples import lane_client
from examples.lane_client import LaneClient

pytestmark = pytest.mark.real_time


class PlainClient:
    def __init__(self, endpoint: str) -> None:
        self.context = zmq.Context()
        self.peer = Peer(self.context, endpoint, rcvhwm=0)

    def send(self, kind: str, payload=(), **fields) -> int:
        request_id = self.peer.next_id()
        header = {"type": kind, "request_id": request_id, **fields}
        self.peer.send_frames([b"KVF1", msgpack.packb(header), *payload])
        return request_id

    def receive(self) -> tuple[dict, list[bytes]]:
        magic, header, *payload = self.peer.receive_frames()
        assert magic == b"KVF1"
        return msgpack.unpackb(header), payload

    def ask(self, kind: str, payload=(), **fields) -> dict:
        request_id = self.send(kind, payload, **fields)
        reply, _ = self.receive()
        assert reply["request_id"] == request_id
        return reply

    def close(self) -> None:
        self.context.destroy(linger=0)


def checksum(namespace: str, key: bytes, block: bytes) -> int:
    identity = xxhash.xxh3_64_intdigest(namespace.encode() + b"\0" + key)
    return xxhash.xxh3_64_intdigest(block, seed=identity)


def split(reply: dict, payload: list[bytes]) -> list[bytes]:
    """The blocks of a reply: back to back in their frames, `blocks_per_frame` to each."""
    joined, blocks, start = b"".join(payload), [], 0
    for length in reply.get("lengths", []):
        blocks.append(joined[start : start + length])
        start += length
    assert start == len(joined)
    assert len(payload) == -(-len(blocks) // reply.get("blocks_per_frame", 1))
    return blocks


@pytest.fixture(scope="module")
def endpoint():
    server = ServerProcess("64MiB", "--lanes", "127.0.0.1:*")
    yield server.endpoint
    server.close()


@pytest.fixture
def client(endpoint):
    client = PlainClient(endpoint)
    yield client
    client.close()


@pytest.mark.parametrize("size", [5000, 300_000])
def test_a_client_written_from_the_document_alone_gets_back_what_it_put(client, size):
    namespace = f"plain-{size}"
    keys = [b"key-%d" % n for n in range(6)]
    blocks = [bytes([n + 1]) * (size - n) for n in range(6)]

    welcome = client.ask("hello", protocol=2, namespace=namespace, block_bytes=size)
    assert welcome["type"] == "welcome"
    assert "tcp" in welcome["transports"]

    sums = [checksum(namespace, key, block) for key, block in zip(keys, blocks, strict=True)]
    frames = [b"".join(blocks[:4]), b"".join(blocks[4:])]
    lengths = [len(block) for block in blocks]
    stored = client.ask(
        "put", frames, namespace=namespace, keys=keys, lengths=lengths, checksums=sums,
        blocks_per_frame=4, deferred=False,
    )  # fmt: skip
    assert (stored["type"], stored["created"], stored["outcomes"]) == ("stored", 6, bytes(6))

    found = client.ask("lookup", namespace=namespace, keys=[*keys, b"other"])
    assert (found["prefix"], found["states"]) == (6, b"\2\2\2\2\2\2\0")

    asked = [keys[3], b"other", keys[0], keys[5]]
    client.send("get", namespace=namespace, keys=asked)
    got, payload = client.receive()
    assert (got["hit"], got["miss"], got["found"], payload) == (3, 1, [0, 2, 3], [])
    arrived = {}
    more = True
    while more:
        part, payload = client.receive()
        assert part["type"] == "blocks"
        for index, block, announced in zip(
            part["indices"], split(part, payload), part["checksums"], strict=True
        ):
            assert checksum(namespace, asked[index], block) == announced
            arrived[asked[index]] = block
        more = part["more"]
    assert arrived == {keys[n]: blocks[n] for n in (0, 3, 5)}

    client.send("get", namespace=namespace, keys=asked, stream=False)
    got, payload = client.receive()
    assert split(got, payload) == [blocks[3], blocks[0], blocks[5]]

    stats = client.ask("stats")
    assert stats["namespaces"][namespace]["tiers"]["memory"]["blocks"] == 6
    assert stats["counters"]["integrity_checksum"] == 0
    assert client.ask("touch", namespace=namespace, keys=keys)["touched"] == 6
    assert client.ask("verify", namespace=namespace, keys=keys)["intact"] == 6
    assert client.ask("clear", namespace=namespace)["removed"] == {"memory": 6}
    assert stats["epoch"] == welcome["epoch"]


def test_the_example_client_gets_back_over_its_lane_what_it_put(endpoint):
    client = LaneClient(endpoint, "lane", 300_000)
    blocks = {b"key-%d" % n: bytes([n + 1]) * (300_000 - n) for n in range(6)}
    assert client.put(blocks) == 6
    assert client.put(blocks) == 0, "they exist; their bytes are discarded"
    assert client.get([b"other", *blocks]) == blocks
    assert client.get([b"other"]) == {}
    client.close()


def test_the_example_client_is_a_command(endpoint, capsys):
    lane_client.main([endpoint])
    printed = capsys.readouterr().out
    assert "3 blocks are new" in printed and "key-2 (4000 bytes)" in printed
