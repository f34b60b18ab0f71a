"""A client of one server answers as one of a list of one."""

import pytest
from client_helpers import BLOCK_BYTES, NAMESPACE, block, empty_rows, key, rows_of
from fake_server import PATIENCE_S, eventually

from remote_server.client import BreakerState, CacheClient
from remote_server.server.config import ServerConfig
from remote_server.server.server import Server
from remote_server.values import MiB

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures"]


@pytest.fixture
def server():
    with Server(ServerConfig(bind="tcp://127.0.0.1:*", memory=MiB, populate=False)) as server:
        yield server


def test_its_one_server_is_number_0_and_has_no_name(server, make_client):
    client: CacheClient = make_client(server.endpoint)
    assert client.names == ("",)
    assert client.names is client.names
    assert (client.are_ready, client.num_ready) == ((True,), 1)
    assert client.epochs == (server.store.epoch,)
    assert client.breakers == (BreakerState.CLOSED,)
    assert {client.server_of(key(number)) for number in range(9)} == {0}


def test_it_needs_no_anchors_and_ignores_those_that_it_gets(server, make_client):
    client = make_client(server.endpoint)
    assert not client.places_by_run
    keys, anchors = [key(1), key(2)], [key(1), None]
    put = client.put(NAMESPACE, keys, rows_of([1, 2]), deferred=False, anchors=anchors)
    assert put.result(PATIENCE_S).created == 2
    found = client.lookup(NAMESPACE, keys, timeout_s=PATIENCE_S, anchors=anchors)
    assert found.result(PATIENCE_S).prefix == 2
    rows = empty_rows(2)
    got = client.get(NAMESPACE, keys, rows, stall_s=PATIENCE_S, anchors=anchors).result(PATIENCE_S)
    assert [bytes(row) for row in rows] == [block(1, BLOCK_BYTES), block(2, BLOCK_BYTES)]
    assert not got.parts


def test_it_does_not_use_its_server_once_that_is_excluded(server, make_client):
    client = make_client(server.endpoint)
    client.exclude("another", "it is in no list")
    assert client.ready
    client.exclude("", "it returned other bytes")
    eventually(lambda: not client.ready, "no request is sent")
    assert client.num_ready == 0
