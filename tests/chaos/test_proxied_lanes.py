"""Lanes pass through the fault proxy, and meet its faults there."""

import pytest
from chaos_client import ChaosClient
from chaos_server import ChaosServer, eventually
from faults import BOTH, TO_CLIENT, TO_SERVER, Faults
from oracle import LARGE, MEDIUM

NUMBERS = range(3)


@pytest.fixture(scope="module")
def server():
    """One for all: nothing here is done to the server itself."""
    with ChaosServer() as server:
        yield server
        server.wait_until_at_rest()


@pytest.fixture
def client(make_client) -> ChaosClient:
    client: ChaosClient = make_client("lanes")
    eventually(lambda: client.has_all_lanes, "both lanes are open")
    assert client.finish(client.put(LARGE, NUMBERS, force=True)) == "stored"
    return client


def test_blocks_pass_by_no_other_way(client, proxy, server):
    assert proxy.counts["lanes"] == 2
    before = server.stats().counters["lane_bytes_out"]
    proxy.set(Faults(frozen=BOTH))
    request = client.get(LARGE, NUMBERS)
    assert not request.future.done()
    proxy.clear()
    assert client.finish(request) == "hit"
    sent = server.stats().counters["lane_bytes_out"] - before
    assert sent == len(NUMBERS) * LARGE.block_bytes


@pytest.mark.parametrize("direction", [TO_SERVER, TO_CLIENT], ids=lambda one: one.name.lower())
def test_a_block_that_is_caught_halfway_breaks_its_lane_and_costs_its_own_transfer(
    direction, client, proxy
):
    """Also when the proxy ends the lane: the other connections stay."""
    before = client.client.counters()
    caught = proxy.catch(direction, "lane", fraction=0.5)
    if direction is TO_SERVER:
        request = client.put(MEDIUM, NUMBERS, force=True)
    else:
        request = client.get(LARGE, NUMBERS)
    caught.wait()
    caught.release(deliver=False)
    assert client.finish(request) in ("unavailable", "part hit", "declined")
    # The server may report the end of the lane before the client has seen it.
    eventually(
        lambda: client.client.counters()["lanes_broken"] == before["lanes_broken"] + 1,
        "the lane is broken",
    )
    assert client.client.counters()["connects"] == before["connects"]
    eventually(lambda: client.client.lanes.num_open == 2, "another lane is opened")
    assert client.finish(client.get(LARGE, NUMBERS)) == "hit"
