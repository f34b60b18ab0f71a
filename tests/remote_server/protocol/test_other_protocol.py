"""A client and a server of different protocol numbers: one refusal in words, on both sides."""

import msgpack
import pytest
from client_helpers import BLOCK_BYTES, NAMESPACE, empty_rows, key, rows_of, turn
from descriptors import memfd
from fake_server import PATIENCE_S, eventually
from msgspec.structs import replace
from wire_peer import REGION_BYTES, TICKETS_BYTES, LocalConnection

from remote_server import protocol
from remote_server.cli.connection import ask_stats
from remote_server.client import GetOutcome
from remote_server.client.connection.session import OTHER_PROTOCOL_RETRY_S, Standing
from remote_server.errors import ServerUnavailable
from remote_server.protocol import Attach, Hello, NotAttached, Stats

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures"]

UPGRADE_CLIENT = "the server speaks protocol 2, the client protocol 1: upgrade the client"
UPGRADE_SERVER = "the server speaks protocol 1, the client protocol 2: upgrade the server"


# ── an old client at this server ─────────────────────────────────────────────────────────


def ask_as_old(peer, kind, **fields):
    header = {"type": kind, "request_id": peer.next_id(), "namespace": "ns", **fields}
    peer.send_frames([b"KVF1", msgpack.packb(header)])
    reply, _ = peer.receive()
    assert reply.request_id == header["request_id"]
    return reply


def old_hello(peer, client="engine-1", number=1):
    return ask_as_old(peer, "hello", protocol=number, block_bytes=BLOCK_BYTES, client=client)


def test_the_refusal_of_a_client_names_both_numbers_and_the_side_to_upgrade(connect):
    error = old_hello(connect())
    assert (error.code, error.protocol) == ("unsupported_protocol", 2)
    assert error.message == UPGRADE_CLIENT
    newer = old_hello(connect(), number=3)
    assert newer.message.endswith("the client protocol 3: upgrade the server")


def test_an_old_client_at_the_local_socket_is_refused_in_words(peer):
    local = LocalConnection(peer.hello().local_socket)
    attach = Attach(protocol=1, client="engine-1", region_bytes=REGION_BYTES)
    local.send(protocol.encode_local(attach), [memfd(REGION_BYTES), memfd(TICKETS_BYTES)])
    assert local.receive()[0] == NotAttached(reason=UPGRADE_CLIENT)


# ── this client at an old server ─────────────────────────────────────────────────────────


def refusal(fake):
    """Of a server of protocol 1: without a number, and without the side to upgrade."""
    return fake.refuse("unsupported_protocol")


def welcome(fake):
    return lambda asked: fake.send(asked, replace(fake.welcome(asked), protocol=1))


def test_a_command_at_an_old_server_names_the_side_to_upgrade(fake, make_client):
    fake.rules[Stats] = lambda asked: fake.send_raw(asked, b"KVF1", msgpack.packb({
        "type": "stats_reply", "request_id": asked.message.request_id, "epoch": fake.epoch,
        "server": "old", "uptime_s": 1.0, "tiers": {}, "counters": {},
        "namespaces": {"n": {"block_bytes": 1, "blocks": 2, "used_bytes": 3, "disk_blocks": 4,
                             "client": "", "fingerprint": {}}},
    }))  # fmt: skip
    with pytest.raises(ServerUnavailable, match=UPGRADE_SERVER):
        ask_stats(make_client(fake.endpoint), PATIENCE_S)


def all_refused(client):
    return all(
        one.standing is Standing.REFUSED for one in client._loop.session.declarations.values()
    )


@pytest.mark.parametrize("answer", [refusal, welcome])
def test_at_an_old_server_every_block_is_a_miss_and_one_line_gives_the_reason(
    fake, make_client, clock, caplog, answer
):
    fake.rules[Hello] = answer(fake)
    client = make_client(fake.endpoint, clock=clock, wait=False)
    client.declare("another", BLOCK_BYTES)
    fake.wait_for(Hello, number=2)
    eventually(lambda: all_refused(client), "both have their refusal")
    assert UPGRADE_SERVER in caplog.text
    got = client.get(NAMESPACE, [key(0)], empty_rows(1)).result(PATIENCE_S)
    assert (got.outcomes, UPGRADE_SERVER in str(got.error)) == ([GetOutcome.UNAVAILABLE], True)
    put = client.put("another", [key(0)], rows_of(range(1))).result(PATIENCE_S)
    assert isinstance(put.error, ServerUnavailable)
    assert isinstance(client.lookup(NAMESPACE, [key(0)]).exception(PATIENCE_S), ServerUnavailable)
    for number in range(2, 5):
        eventually(lambda: all_refused(client), "both have their refusal")
        clock.advance(OTHER_PROTOCOL_RETRY_S - 1)
        turn(client)
        assert len(fake.all_asked(Hello)) == 2 * (number - 1), "no storm of hellos"
        clock.advance(2)
        fake.wait_for(Hello, 2 * number)
    assert caplog.text.count("upgrade the server") == 1, caplog.text
    assert "refused: " not in caplog.text
    eventually(lambda: all_refused(client), "both have their refusal")
    fake.behave()
    clock.advance(OTHER_PROTOCOL_RETRY_S + 1)
    eventually(lambda: client.ready)
