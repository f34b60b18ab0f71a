"""What connections can make a server's process hold beside its arena: little, whatever they do.

Each attack runs against `python -m remote_server`, whose resident memory is looked at during it and
behind it.
"""

import fcntl
import os
import socket
import time

import msgpack
import pytest
from deaf_peer import MOST_GROWTH, HandPeer, MiB, ServerProcess, sparse_memfd

SMALL = 65_000  # in slots of 65,024 bytes: no two blocks are neighbours
NUM_BLOCKS = 700


@pytest.fixture
def server(request: pytest.FixtureRequest):
    server = ServerProcess()
    yield server
    left = server.growth()
    server.close()
    print(
        f"\n{request.node.name}: {server.at_start / MiB:.0f} MiB at the start, "
        f"{server.most / MiB:+.0f} MiB at most, {left / MiB:+.0f} MiB at the end"
    )


@pytest.fixture
def connect(server: ServerProcess):
    peers = []

    def connect(**options: bool) -> HandPeer:
        peers.append(HandPeer(server.endpoint, **options))
        return peers[-1]

    yield connect
    for peer in peers:
        peer.close()


def texts(number: int, fields: int, chars: int) -> dict[str, str]:
    return {f"field {at}": f"{number} ".ljust(chars, "x") for at in range(fields)}


# ── gathered frames ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_small_blocks_for_peers_that_do_not_read_take_no_memory_and_others_are_served(
    server, connect, stream
):
    honest = connect()
    honest.hello()
    for first in range(0, NUM_BLOCKS, 50):
        assert honest.put(range(first, first + 50), SMALL)["created"] == 50
    keys = [b"key-%032d" % number for number in range(NUM_BLOCKS)]
    deaf = [connect(small=True) for _ in range(16)]
    for _ in range(4):
        for peer in deaf:
            peer.send("get", namespace="ns", keys=keys, stream=stream)
    until_answered_or_refused(honest, 4 * len(deaf))
    server.watch(0.5)
    began = time.monotonic()
    meanwhile = honest.get(range(NUM_BLOCKS), SMALL)
    assert time.monotonic() - began < 10, "others are served"
    server.growth()
    assert server.most < MOST_GROWTH
    for peer in deaf:
        peer.close()
    assert_at_rest(honest)
    messages = honest.get(range(NUM_BLOCKS), SMALL)
    assert messages <= NUM_BLOCKS // 15 + 1, "blocks share frames again"
    if stream:
        assert meanwhile > 2 * messages, "they went one by one, from where they lie"


def until_answered_or_refused(peer: HandPeer, num_gets: int) -> None:
    """Of these gets, each of all blocks, every one was answered or refused by name."""
    ends = time.monotonic() + 60
    while True:
        counters = peer.stats()["counters"]
        unread = counters.get("bad_messages_unread", 0)
        refused = unread + counters.get("refused_too_much_in_flight", 0)
        if counters["get_total"] // NUM_BLOCKS + refused >= num_gets:
            return
        assert time.monotonic() < ends, f"{counters['get_total']} keys, {refused} refused"


def assert_at_rest(peer: HandPeer) -> None:
    """Soon nothing is pinned."""
    ends = time.monotonic() + 20
    while peer.stats()["tiers"]["memory"]["pinned"]:
        assert time.monotonic() < ends, "blocks stay pinned"
        time.sleep(0.02)


def test_what_a_peer_did_not_read_for_long_arrives_whole_and_in_order(server, connect):
    honest, slow = connect(), connect(small=True)
    honest.hello()
    for first in range(0, NUM_BLOCKS, 50):
        honest.put(range(first, first + 50), SMALL)
    keys = [b"key-%032d" % number for number in range(NUM_BLOCKS)]
    slow.send("get", namespace="ns", keys=keys)
    honest.wait_for("get_total", NUM_BLOCKS)
    server.watch(0.2)
    assert slow.get_rest(range(NUM_BLOCKS), SMALL) <= NUM_BLOCKS // 15 + 1
    assert server.most < MOST_GROWTH


# ── replies ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("asked_for", [{}, {"fingerprints": True}], ids=["short", "fingerprints"])
def test_replies_that_nobody_reads_take_no_memory(server, connect, asked_for):
    honest = connect()
    for number in range(200):
        honest.hello(f"ns-{number}", fingerprint=texts(number, 20, 500))
    deaf = [connect(small=True) for _ in range(2)]
    for peer in deaf:
        for _ in range(20):
            peer.socket.sendall(b"".join(peer.message("stats", **asked_for) for _ in range(100)))
    honest.wait_for("bad_messages_unread", 1)
    server.watch(1.0)
    assert server.most < MOST_GROWTH
    assert honest.stats()["type"] == "stats_reply"
    replies = 0
    while deaf[0].readable():  # the replies are in order, and then there is nothing more
        reply, _ = deaf[0].receive()
        replies += 1
        assert reply["request_id"] == replies
        if not deaf[0].readable():
            server.watch(0.1)
    assert 0 < replies < 2000
    assert deaf[0].ask("lookup", namespace="ns-1", keys=[b"k"])["states"] == b"\0"


def test_small_replies_that_nobody_reads_take_no_memory_either(server, connect):
    """Each below the size from which every reply is looked after."""
    honest = connect()
    for number in range(100):
        honest.hello(f"ns-{number}")
    size = len(msgpack.packb(honest.stats()))
    assert 10_000 < size < 16_000
    deaf = [connect(small=True) for _ in range(16)]
    for peer in deaf:
        peer.socket.sendall(b"".join(peer.message("stats") for _ in range(600)))
    honest.wait_for("bad_messages_unread", 16 * 100)
    server.watch(0.5)
    assert server.most < MOST_GROWTH


# ── fingerprints ─────────────────────────────────────────────────────────────────────────────


def test_a_fingerprint_that_is_too_large_is_refused_with_the_reason(server, connect):
    peer = connect()
    refused = peer.hello("large", fingerprint=texts(0, 17, 1_000))
    assert (refused["type"], refused["code"]) == ("error", "bad_request")
    assert "at most 16384" in refused["message"]
    assert "large" not in peer.stats()["namespaces"]
    assert peer.hello("fits", fingerprint=texts(0, 16, 1_000))["type"] == "welcome"


@pytest.mark.parametrize(("fields", "chars"), [(64, 1_024), (15, 1_000)], ids=["huge", "allowed"])
def test_many_fingerprints_take_no_memory_and_stats_stay_quick(server, connect, fields, chars):
    peer, honest = connect(), connect()
    honest.hello("honest", client="engine", fingerprint={"model": "m"})
    for number in range(1_600):
        peer.hello(f"ns-{number % 1000}", client=f"c{number % 7}",
                   fingerprint=texts(number, fields, chars))  # fmt: skip
        server.growth()
    began = time.monotonic()
    reply = honest.stats(fingerprints=True)
    assert time.monotonic() - began < 1.0
    server.growth()
    assert server.most < MOST_GROWTH
    described = [one for one in reply["namespaces"].values() if one["fingerprint"]]
    assert sum(len(msgpack.packb(one)) for one in described) < 6 * MiB
    if fields == 15:
        assert reply["namespaces"]["honest"]["forgotten"]
        assert reply["namespaces"]["ns-599"]["fingerprint"] == texts(1_599, fields, chars)
        assert reply["counters"]["fingerprints_forgotten"] > 100
    again = honest.hello("honest", client="engine", fingerprint={"model": "m"})
    assert again["type"] == "welcome"
    known = honest.stats(fingerprints=True)["namespaces"]["honest"]
    assert (known["client"], known["fingerprint"]) == ("engine", {"model": "m"})
    assert not known["forgotten"]


# ── holes ────────────────────────────────────────────────────────────────────────────────────


def test_puts_from_a_region_that_is_one_hole_allocate_nothing(server, connect):
    peer, region_bytes, length = connect(), 1024 * MiB, 1 * MiB
    welcome = peer.hello(block_bytes=length)
    region, tickets = sparse_memfd(region_bytes), sparse_memfd(8_192)
    local = socket.socket(socket.AF_UNIX)
    local.connect("\0" + welcome["local_socket"])
    for fd in (region, tickets):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    os.pwrite(tickets, (1).to_bytes(8, "little"), 0)
    attach = {"type": "attach", "request_id": 1, "protocol": 1, "client": "",
              "region_bytes": region_bytes}  # fmt: skip
    socket.send_fds(local, [msgpack.packb(attach)], [region, tickets])
    attached = msgpack.unpackb(socket.recv_fds(local, 4096, 2)[0])
    for first in range(0, region_bytes // length, 32):
        offsets = [at * length for at in range(first, first + 32)]
        stored = peer.ask(
            "put_shared", namespace="ns", keys=[b"%d" % at for at in offsets],
            lengths=[length] * 32, checksums=[], offsets=offsets, region=attached["region"],
            ticket=0, ticket_value=1,
        )  # fmt: skip
        assert stored["type"] == "stored", stored
        server.growth()
    assert os.fstat(region).st_blocks == 0
    assert server.most < MOST_GROWTH
    local.close()
    os.close(region)
    os.close(tickets)


# ── namespaces ───────────────────────────────────────────────────────────────────────────────


def test_many_namespaces_of_a_byte_keep_no_new_engine_out_and_cost_their_own_connection(
    server, connect
):
    old, greedy, new = connect(), connect(), connect()
    old.hello("old")
    old.put(range(8), 65_536, namespace="old")
    for number in range(1_100):
        assert greedy.hello(f"ns-{number}", block_bytes=1)["type"] == "welcome"
        assert greedy.put(range(1), 1, namespace=f"ns-{number}")["created"] == 1
        server.growth()
    assert new.hello("new")["type"] == "welcome"
    assert new.put(range(4), 65_536, namespace="new")["created"] == 4
    assert old.get(range(8), 65_536, namespace="old")
    stats = new.stats()
    assert len(stats["namespaces"]) == 1024
    assert stats["counters"]["namespaces_evicted_idle"] == 1_100 + 2 - 1024
    assert "ns-0" not in stats["namespaces"] and "ns-1099" in stats["namespaces"]
    assert server.most < MOST_GROWTH


def test_an_empty_namespace_may_be_declared_with_another_block_size(server, connect):
    peer = connect()
    peer.hello("ns", block_bytes=64)
    peer.put(range(1), 64)
    assert peer.hello("ns", block_bytes=128)["code"] == "block_bytes_mismatch"
    peer.ask("clear", namespace="ns")
    assert peer.hello("ns", block_bytes=128)["type"] == "welcome"
    assert peer.put(range(1), 128)["created"] == 1
    assert peer.hello("ns", block_bytes=64)["code"] == "block_bytes_mismatch"


# ── what libzmq holds ────────────────────────────────────────────────────────────────────────


def test_a_message_without_an_end_is_cut_off_where_no_correct_client_gets(server, connect):
    """Nothing of it has come to the server: libzmq hands over whole messages. The bound is a
    message of 256 MiB, 64 MiB, and 32 MiB for each connection; a stall adds what is sent in it."""
    honest, endless = connect(), connect()
    honest.hello()
    honest.put(range(4), SMALL)
    piece = bytes([3]) + (1 * MiB).to_bytes(8, "big") + bytes(1 * MiB)

    def send_without_end() -> None:
        while True:
            endless.socket.sendall(piece)
            server.growth()

    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        send_without_end()
    assert server.most < (256 + 64 + 2 * 32 + 192) * MiB
    again = connect()
    assert again.get(range(4), SMALL) == 1
    assert again.stats()["counters"]["sockets_replaced"] == 1
    server.watch(0.2)
    assert server.growth() < MOST_GROWTH
