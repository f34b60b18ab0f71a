"""A stand-in for `Fleet`, of several servers, whose futures the test completes."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
from scripted_client import Asked, Engine, ScriptedClient
from vllm.v1.kv_offload.base import LookupResult

from remote_server.client import BreakerState, GetPart


class ScriptedFleet(ScriptedClient):
    """What each server does is the test's to set."""

    places_by_run = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.names = ("a", "b", "c")
        self.boots: dict[str, str | None] = dict.fromkeys(self.names, "boot-1")
        self.away: set[str] = set()
        self.holders: dict[bytes, str] = {}
        self.excluded: list[tuple[str, str]] = []

    @property
    def epochs(self) -> tuple[str | None, ...]:
        return tuple(self.boots[name] for name in self.names)

    @property
    def are_ready(self) -> tuple[bool, ...]:
        return tuple(self.ready and name not in self.away for name in self.names)

    @property
    def breakers(self) -> tuple[BreakerState, ...]:
        return (BreakerState.CLOSED,) * len(self.names)

    def server_of(self, key: bytes) -> int:
        return self.names.index(self.holders.get(key, self.names[0]))

    def exclude(self, name: str, why: str) -> None:
        self.excluded.append((name, why))


def fleet_engine(num_rows: int = 40, **settings: Any) -> Engine:
    return Engine(num_rows, client_factory=ScriptedFleet, **settings)


def landed(asked: Asked, *parts: GetPart, hot: Sequence[int] = ()) -> None:
    """The load ends, with these parts and all rows."""
    asked.landed(*range(len(asked.keys)), parts=parts, hot=hot)


def pool_with(*keys: bytes) -> Any:
    """What the tier sees of a pool in which these keys are."""
    parent = MagicMock()
    parent.lookup.side_effect = lambda key, _: (
        LookupResult.HIT if key in keys else LookupResult.MISS
    )
    parent.create_store_job.side_effect = lambda some, context: SimpleNamespace(
        job_id=1000 + parent.create_store_job.call_count, keys=some, req_context=context,
        chunk_ids=np.arange(len(some)),
    )  # fmt: skip
    return parent
