"""A stand-in for `RemoteClient` whose futures the test completes, and an engine around the tier."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import OffloadingGroupConfig
from vllm.v1.kv_offload.tiering.base import TransferJob

from kv_connector.pool.rows import PoolRows
from kv_connector.tier import metrics
from kv_connector.tier.remote_tier import RemoteTier
from remote_server.client import BreakerState, GetOutcome, GetPart, GetResult, PutResult
from remote_server.client.cache_client import OneServer
from remote_server.client.cache_requests import GetRequest, LookupRequest, PutRequest
from remote_server.protocol import EngineReport, Found, KeyState, PutOutcome

STEP_END = ScheduleEndContext((), ())


@dataclass
class Asked:
    """One request that the tier made, whose parts it has; the test completes `reply`."""

    operation: str
    request: Any
    reply: "Future[Any]" = field(default_factory=Future)

    def __getattr__(self, part: str) -> Any:
        return getattr(self.request, part)

    def found(self, *states: int, remote: Sequence[int] = ()) -> None:
        """The reply comes, in time or after the deadline."""
        prefix = next((i for i, s in enumerate(states) if s != KeyState.READABLE), len(states))
        found = Found(
            request_id=1, epoch="e", prefix=prefix, states=bytes(list(states)), remote=[*remote]
        )
        if not self.reply.done():
            self.reply.set_result(found)
        elif self.on_late is not None:
            self.on_late(found)

    def landed(self, *indices: int, parts: Sequence[GetPart] = (), hot: Sequence[int] = ()) -> None:
        """These rows arrived; the rest stalled."""
        outcomes = [
            GetOutcome.HIT if i in indices else GetOutcome.LATE for i in range(len(self.keys))
        ]
        size = sum(self.rows[i].nbytes for i in indices)
        self.reply.set_result(GetResult([*indices], outcomes, bytes=size, parts=parts, hot=[*hot]))

    def stored(self) -> None:
        n = len(self.keys)
        self.reply.set_result(
            PutResult(total=n, created=n, outcomes=[PutOutcome.CREATED] * n, bytes_sent=n)
        )


class ScriptedClient(OneServer):
    """Records what it is asked; `ready` is the test's to set."""

    names: tuple[str, ...] = ("",)
    ready, absent, closed = True, False, False
    epoch: str | None = "boot-1"
    breaker = BreakerState.CLOSED
    transport, queued_bytes = "tcp", 0

    latest: "ClassVar[ScriptedClient]"
    """The one that was made last."""

    def __init__(self, config: Any) -> None:
        ScriptedClient.latest = self
        self.config = config
        self.asked: list[Asked] = []
        self.stats_asked: list[Future[Any]] = []
        self.declared: list[tuple[str, int, dict[str, str]]] = []
        self.forgotten: list[str] = []
        self.reports: list[EngineReport] = []

    def declare(
        self, namespace: str, block_bytes: int, fingerprint: Mapping[str, str] = {}
    ) -> None:
        self.declared.append((namespace, block_bytes, dict(fingerprint)))

    def report(self, report: EngineReport) -> None:
        self.reports.append(report)

    def register(self, view: memoryview, fd: int) -> None:
        """The pool is not needed: the test writes into the rows that it is handed."""

    def forget(self, namespace: str) -> None:
        self.forgotten.append(namespace)

    def send_lookup(self, asked: LookupRequest) -> "Future[Any]":
        return self._ask("lookup", asked)

    def send_get(self, asked: GetRequest) -> "Future[Any]":
        return self._ask("get", asked)

    def send_put(self, asked: PutRequest) -> "Future[Any]":
        return self._ask("put", asked)

    def send_touch(self, namespace: str, keys: list[bytes], timeout_s: float) -> "Future[Any]":
        return self._ask("touch", SimpleNamespace(namespace=namespace, keys=keys))

    def send_stats(self, timeout_s: float, *, fingerprints: bool) -> "Future[Any]":
        self.stats_asked.append(Future())
        return self.stats_asked[-1]

    def counters(self) -> dict[str, int]:
        return {"bytes_in": 0}

    def cancel_all(self, timeout_s: float) -> bool:
        for asked in self.open:
            if asked.operation == "get":
                asked.landed()
            elif asked.operation == "put":
                asked.reply.set_result(PutResult(outcomes=[None] * len(asked.keys)))
            else:
                asked.reply.cancel()
        return True

    def close(self, timeout_s: float = 1.0) -> None:
        self.closed = True

    @property
    def open(self) -> list[Asked]:
        """What has no reply."""
        return [asked for asked in self.asked if not asked.reply.done()]

    def reply_to_all(
        self, state: KeyState = KeyState.READABLE, *, loads: bool = True
    ) -> list[Asked]:
        """Every key of a lookup is `state`, `loads` land, puts are stored. Returns what was
        open."""
        answered = self.open
        for asked in answered:
            if asked.operation == "lookup":
                asked.found(*[state] * len(asked.keys))
            elif asked.operation == "get" and loads:
                asked.landed(*range(len(asked.keys)))
            elif asked.operation == "put":
                asked.stored()
        return answered

    def last(self, operation: str) -> Asked:
        return next(a for a in reversed(self.asked) if a.operation == operation)

    def count(self, operation: str) -> int:
        return sum(a.operation == operation for a in self.asked)

    def _ask(self, operation: str, request: Any) -> "Future[Any]":
        self.asked.append(Asked(operation, request))
        return self.asked[-1].reply


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


ROW_BYTES = 4096
BLOCK_BYTES = 4000
TOKENS_PER_BLOCK = 32
GROUPS = (OffloadingGroupConfig(TOKENS_PER_BLOCK, ("layer",), 0),)


def spec_of_tier(engine: str = "engine", **parallel: int) -> Any:
    """What the tier sees of vLLM's offloading spec."""
    parallel_config = SimpleNamespace(world_size=1, **parallel)
    return SimpleNamespace(
        tokens_per_block=(TOKENS_PER_BLOCK,),
        blocks_per_chunk=1,
        cpu_page_size_per_worker=BLOCK_BYTES,
        replicated_layout=False,
        config=SimpleNamespace(engine_id=engine, parallel=parallel_config, groups=GROUPS),
    )


def rows_of(*tokens_per_block: int, blocks_per_chunk: int = 1) -> PoolRows:
    """Rows of a model with such groups. vLLM numbers the groups that it offloads, here 1, 3, …"""
    spec = spec_of_tier()
    spec.tokens_per_block, spec.blocks_per_chunk = tokens_per_block, blocks_per_chunk
    spec.config.groups = [
        OffloadingGroupConfig(tokens, ("layer",), 2 * number + 1)
        for number, tokens in enumerate(tokens_per_block)
    ]
    return PoolRows(memoryview(np.zeros((8, ROW_BYTES), np.int8)), spec)


class Counted:
    """What a tier counts."""

    tier: RemoteTier

    def counted(self, metric: str, label: str = "") -> int:
        return self.tier.counters.totals().get((metric, label), 0)

    def hook_errors(self) -> dict[tuple[str, str], int]:
        totals = self.tier.counters.totals()
        return {key: n for key, n in totals.items() if key[0] == metrics.HOOK_ERRORS}

    def collect(self) -> dict[str, Any]:
        """The metrics as vLLM collects them: by name, the values by their labels."""
        stats = self.tier.get_stats()
        assert stats is not None
        return dict(stats.data["data"])


class Engine(Counted):
    """The part of vLLM that a tier meets: a pool, a spec, requests and jobs."""

    def __init__(
        self,
        num_rows: int = 40,
        *,
        declared: bool = True,
        client_factory: Any = ScriptedClient,
        **settings: Any,
    ) -> None:
        self.pool = np.zeros((num_rows, ROW_BYTES), np.int8)
        self.clock = Clock()
        self.tier = RemoteTier(
            spec_of_tier(),
            memoryview(self.pool),
            "RemoteTier",
            sees_everything=True,
            client_factory=client_factory,
            clock=self.clock,
            server="tcp://127.0.0.1:1",
            **settings,
        )
        self.client: Any = ScriptedClient.latest
        if declared:
            self.tier.declare("model", {"model": "m"})
        self._jobs = 0

    def request(self, name: str, num_keys: int, **params: Any) -> tuple[ReqContext, list[Any]]:
        context = ReqContext(name, kv_transfer_params=params or None)
        keys = [make_offload_key(f"{i:032d}".encode(), 0) for i in range(num_keys)]
        for i, key in enumerate(keys):
            context.set_offload_key_position(key, (i + 1) * TOKENS_PER_BLOCK)
        self.tier.on_new_request(context)
        return context, keys

    def ask(
        self, name: str, num_keys: int, *states: KeyState, **params: Any
    ) -> tuple[ReqContext, list[Any]]:
        """A request whose lookup was sent in a step, and answered if there are `states`."""
        context, keys = self.request(name, num_keys, **params)
        self.lookup(context, keys)
        self.step()
        if states:
            self.client.last("lookup").found(*states)
        return context, keys

    def lookup(self, context: ReqContext, keys: Sequence[OffloadKey]) -> list[str]:
        return [self.tier.lookup(key, context).name for key in keys]

    def scheduled(self, *requests: str) -> ScheduleEndContext:
        return ScheduleEndContext(requests, ())

    def preempted(self, *requests: str) -> ScheduleEndContext:
        return ScheduleEndContext((), requests)

    def step(self) -> None:
        self.tier.on_schedule_end(STEP_END)

    def job(self, context: ReqContext, keys: Sequence[OffloadKey], rows: Sequence[int]) -> Any:
        self._jobs += 1
        return TransferJob(self._jobs, list(keys), np.array(rows, np.int32), True, context)

    def finished(self) -> list[tuple[int, bool, list[bytes] | None]]:
        return [
            (r.job_id, r.success, None if r.successful_keys is None else list(r.successful_keys))
            for r in self.tier.get_finished_jobs()
        ]
