"""A client that is killed in the middle of every request leaves nothing behind in the server."""

import os
import signal

import pytest
from chaos_client import ChaosClient
from chaos_server import eventually, open_files
from oracle import LARGE
from owned_process import OwnedProcess
from phases import BLOCKS, PHASES, Phase, some


@pytest.fixture
def server(renewed_server):
    return renewed_server


class Doomed:
    """A client, in the process that is killed."""

    def __init__(self, endpoint: str, phase: Phase) -> None:
        self._client, self._phase = ChaosClient(endpoint, phase.transport), phase
        self._client.wait_until_ready()
        phase.prepare(self._client)

    def begin(self) -> None:
        """The request, which never ends."""
        self._request = self._phase.begin(self._client, timeout_s=300)

    def close(self) -> None:
        """It has no time for that."""


@pytest.mark.parametrize(
    "phase",
    some([phase for phase in PHASES if phase.op != "lookup"],
         "tcp-get-blocks-2", "lanes-put-lane-2", "shm-put-put", "shm-get-got"),
)  # fmt: skip
@pytest.mark.parametrize(
    "deliver", [True, pytest.param(False, marks=pytest.mark.whole)], ids=["delivered", "cut"]
)
def test_pins_leases_regions_and_files_of_a_killed_client_are_given_back(
    phase, deliver, server, proxy, make_client, rng
):
    survivor = make_client(phase.transport, server.endpoint)
    assert survivor.finish(survivor.put(LARGE, [5])) == "stored"
    assert survivor.finish(survivor.get(LARGE, [5])) == "hit"
    server.wait_until_at_rest()
    files = open_files(server.pid)
    with OwnedProcess(Doomed, proxy.endpoint, phase) as child:
        caught = phase.catch(proxy, rng.choice([0.0, rng.random(), 1.0]))
        child.begin()
        caught.wait()
        os.kill(child.pid, signal.SIGKILL)
    caught.release(deliver=deliver)
    stats = server.wait_until_at_rest()
    assert stats.counters["leases_expired"] == 0, "they ended with the client, not by their time"
    attached = stats.counters["regions_attached"] - stats.counters["regions_gone"]
    assert attached == (phase.transport == "shm"), "only the survivor's region is left"
    eventually(lambda: open_files(server.pid) <= files, "its connections are closed")
    assert survivor.finish(survivor.get(LARGE, BLOCKS)) in ("hit", "miss", "part hit")
    assert survivor.finish(survivor.get(LARGE, [5])) == "hit"
