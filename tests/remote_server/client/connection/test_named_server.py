"""A real server with a name, and clients that have a list: load and hot beginnings."""

import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from client_helpers import BLOCK_BYTES, NAMESPACE, empty_rows, rows_of
from fake_server import PATIENCE_S, eventually
from memory_server import memory_server

from remote_server.client import GetResult, RemoteClient
from remote_server.protocol import Stretch
from remote_server.values import MiB

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures"]

TOKENS = 512
KEYS = [b"row %d" % number for number in range(10)]
CHAIN = [Stretch(len(KEYS), 0, 0, TOKENS)]
BEGINNINGS = [0, 2, 4, 8]
FLEET = {"server_name": "cache-1", "fleet_digest": "0123456789abcdef"}

Make = Callable[..., RemoteClient]


serving = partial(memory_server, name="cache-1")


def put_all(client: RemoteClient) -> None:
    rows = rows_of(range(len(KEYS)))
    stored = client.put(NAMESPACE, KEYS, rows, chain=CHAIN, deferred=False).result(PATIENCE_S)
    assert stored.created == len(KEYS)


def get_all(client: RemoteClient) -> GetResult:
    done = client.get(NAMESPACE, KEYS, empty_rows(len(KEYS))).result(PATIENCE_S)
    assert done.landed == [*range(len(KEYS))]
    return done


@pytest.mark.parametrize("transport", ["tcp", "shm"], indirect=True)
def test_the_fifth_client_of_a_list_learns_which_beginnings_are_hot(
    transport: str, make_client: Make
):
    with serving() as server:
        clients = [make_client(server.endpoint, **FLEET) for _ in range(5)]
        plain = make_client(server.endpoint)
        assert {one.transport for one in (plain, *clients)} == {transport}
        put_all(plain)
        assert [get_all(client).hot for client in clients[:4]] == [[]] * 4
        assert get_all(clients[0]).hot == get_all(plain).hot == []
        assert get_all(clients[4]).hot == get_all(clients[0]).hot == BEGINNINGS
        assert get_all(plain).hot == []


def test_beginnings_on_disk_are_hot_too(tmp_path: Path, make_client: Make):
    settings = {"disk": str(tmp_path / "disk"), "disk_bytes": 64 * MiB, "disk_write_rate": 0}
    with serving(**settings) as server:
        put_all(make_client(server.endpoint))
        eventually(lambda: server.tiers()["disk"].blocks == len(KEYS))
    with serving(**settings) as server:  # memory is empty now
        clients = [make_client(server.endpoint, **FLEET) for _ in range(5)]
        eventually(lambda: server.tiers()["disk"].pending == 0)
        assert [get_all(client).hot for client in clients] == [[]] * 4 + [BEGINNINGS]


def test_the_age_is_that_of_the_lowest_tier_of_this_server(tmp_path: Path, make_client: Make):
    """Memory evicts to the disk and counts not; the disk does not evict."""
    settings = {"disk": str(tmp_path / "disk"), "disk_bytes": 64 * MiB, "disk_write_rate": 0}
    with serving(**settings, memory=1 * MiB) as server:
        client = make_client(server.endpoint, **FLEET)
        row = memoryview(bytes(BLOCK_BYTES))
        for number in range(400):
            client.put(NAMESPACE, [b"%d" % number], [row], deferred=False).result(PATIENCE_S)
        assert server.tiers()["memory"].evicted_age_s >= 0
        eventually(lambda: client.lookup(NAMESPACE, [b"0"]).result(PATIENCE_S).load.fill > 20)
        assert client.load is not None and client.load.evicted_age_s == -1


def test_a_server_without_a_name_has_that_of_its_host(make_client: Make):
    with serving(name="") as server:
        name = make_client(server.endpoint).stats().result(PATIENCE_S).name
    assert name == socket.gethostname().partition(".")[0] or name == "kvferry"
