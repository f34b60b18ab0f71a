"""Where in a request something may happen: after which part of which message.

A phase is chosen by holding that message in the fault proxy, so nothing depends on timing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from chaos_client import REQUEST_S, ChaosClient, Request
from fault_proxy import FaultProxy
from faults import TO_CLIENT, TO_SERVER, Direction
from oracle import LARGE
from proxy_pipe import Catch

BLOCKS = (0, 1, 2)
"""Those that every phase is about. Of the large ones, so that each is a message of its own."""


@dataclass(frozen=True)
class Phase:
    transport: str
    op: str
    direction: Direction
    type: str
    """The message of PROTOCOL.md that is held; "lane" for a block on a lane."""

    skip: int = 0

    def __str__(self) -> str:
        number = f"-{self.skip + 1}" if self.skip else ""
        return f"{self.transport}-{self.op}-{self.type}{number}"

    def catch(self, proxy: FaultProxy, fraction: float) -> Catch:
        """Hold the message after `fraction` of its bytes."""
        return proxy.catch(self.direction, self.type, fraction=fraction, skip=self.skip)

    def prepare(self, client: ChaosClient) -> None:
        """What has to be there before, for a request that asks for it."""
        if self.op != "put":
            assert client.finish(client.put(LARGE, BLOCKS)) == "stored"

    def begin(self, client: ChaosClient, timeout_s: float = REQUEST_S) -> Request:
        """Make the request. Its message will be held; its future is the caller's to wait for."""
        match self.op:
            case "lookup":
                return client.lookup(LARGE, BLOCKS, timeout_s)
            case "put":
                return client.put(LARGE, BLOCKS, timeout_s)
            case _:
                return client.get(LARGE, BLOCKS, timeout_s)


PHASES = [
    Phase("tcp", "lookup", TO_SERVER, "lookup"),
    Phase("tcp", "lookup", TO_CLIENT, "found"),
    Phase("tcp", "put", TO_SERVER, "put"),
    Phase("tcp", "put", TO_CLIENT, "stored"),
    Phase("tcp", "get", TO_SERVER, "get"),
    Phase("tcp", "get", TO_CLIENT, "got"),
    Phase("tcp", "get", TO_CLIENT, "blocks"),
    Phase("tcp", "get", TO_CLIENT, "blocks", skip=1),
    Phase("lanes", "put", TO_SERVER, "put"),
    Phase("lanes", "put", TO_SERVER, "lane"),
    Phase("lanes", "put", TO_SERVER, "lane", skip=1),
    Phase("lanes", "put", TO_CLIENT, "stored"),
    Phase("lanes", "get", TO_CLIENT, "blocks"),
    Phase("lanes", "get", TO_CLIENT, "lane"),
    Phase("lanes", "get", TO_CLIENT, "lane", skip=1),
    Phase("shm", "put", TO_SERVER, "put"),
    Phase("shm", "put", TO_CLIENT, "stored"),
    Phase("shm", "get", TO_SERVER, "get"),
    Phase("shm", "get", TO_CLIENT, "got"),
    Phase("shm", "get", TO_SERVER, "release"),
]


def some(phases: Sequence[Phase], *quick: str) -> list[object]:
    """Parameters of a test: `phases` in the whole run, and those called `quick` in each."""
    names = [str(phase) for phase in phases]
    assert {*quick} <= {*names}, quick
    return [
        pytest.param(phase, id=name, marks=() if name in quick else pytest.mark.whole)
        for name, phase in zip(names, phases, strict=True)
    ]
