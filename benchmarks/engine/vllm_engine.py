"""A real vLLM engine for benchmarks: `driver.Engine`, in a process of its own."""

import re
import sys
import time
from collections.abc import Sequence
from typing import Self, TypeVar

import zmq

from benchmarks.engine.driver import (
    Batch,
    Counters,
    EngineFailed,
    EngineSettings,
    Request,
    Span,
)
from benchmarks.engine.messages import (
    AskCounters,
    Counted,
    Done,
    Failed,
    Forget,
    LimitStep,
    Order,
    Ran,
    Reply,
    Run,
    Settle,
    Spans,
    Start,
    TakeSpans,
    decode_reply,
    encode,
)
from benchmarks.harness.runner import Skipped
from examples.engine import engine_environment
from examples.processes import LoggedProcess, StartFailed

Kind = TypeVar("Kind", bound=Reply)

START_S = 600.0
"""Loading a large model from a slow disk takes minutes."""

ORDER_S = 3600.0


class _Process(LoggedProcess):
    """`benchmarks.engine.vllm_process`; ready when it accepts orders, before vLLM starts."""

    name = "bench-engine"

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.engine.vllm_process"]
        # Every engine computes on the same cores, with a connector or without.
        super().__init__(command, {**engine_environment(), "VLLM_LOGGING_LEVEL": "WARNING"})
        self.orders = ""

    def is_ready(self) -> bool:
        found = re.search(r"orders on (tcp://\S+)", self.printed())
        if found:
            self.orders = found[1]
        return bool(found)


class VllmEngine:
    """See `driver.Engine`. Several may exist at once; a benchmark runs one of them at a time, and
    the others wait without using a core."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self._process: _Process | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._orders: zmq.Socket[bytes] | None = None

    def start(self) -> Self:
        assert self._process is None, "this engine is already running"
        self._process = _Process()
        try:
            self._process.start()
            self._context = zmq.Context()
            self._orders = self._context.socket(zmq.REQ)
            self._orders.linger = 0
            self._orders.connect(self._process.orders)
            self._ask(Start(self.settings), Done, START_S)
        except StartFailed as error:
            self.stop()
            raise EngineFailed(str(error)) from None
        except BaseException:
            self.stop()
            raise
        return self

    def run(self, requests: Sequence[Request]) -> Batch:
        return self._ask(Run(list(requests)), Ran).batch

    def counters(self) -> Counters:
        return self._ask(AskCounters(), Counted).counters

    def settle(self, timeout_s: float = 60.0) -> float:
        return self._ask(Settle(timeout_s), Done, timeout_s + 10).seconds

    def forget(self, *, pool: bool = False) -> None:
        self._ask(Forget(pool), Done, 120.0)

    def limit_step(self, tokens: int) -> None:
        self._ask(LimitStep(tokens), Done, 60.0)

    def take_spans(self) -> list[Span]:
        return self._ask(TakeSpans(), Spans, 120.0).spans

    def restart(self) -> None:
        self.stop()
        self.start()

    def stop(self) -> None:
        if self._orders is not None:
            self._orders.close()
        if self._context is not None:
            self._context.term()
        self._orders = self._context = None
        if self._process is not None:
            # Killed, as vLLM ends its own engine core at an ordinary stop. Nothing of it survives,
            # and `settle` waits for outstanding transfers to the server.
            self._process.stop(kill=True)
            self._process = None

    def _ask(self, order: Order, expected: type[Kind], timeout_s: float = ORDER_S) -> Kind:
        if self._orders is None or self._process is None:
            raise EngineFailed("this engine does not run")
        deadline = time.monotonic() + timeout_s
        self._orders.send(encode(order))
        while not self._orders.poll(500):
            if not self._process.alive():
                raise EngineFailed(f"the engine ended\n{self._process.log_tail()}")
            if time.monotonic() > deadline:
                raise EngineFailed(
                    f"no answer to {type(order).__name__} after {timeout_s:g} s\n"
                    f"{self._process.log_tail()}"
                )
        reply = decode_reply(self._orders.recv())
        if isinstance(reply, Failed) and reply.skipped:
            raise Skipped(reply.reason)
        if isinstance(reply, Failed):
            raise EngineFailed(f"{reply.reason}\n{self._process.log_tail(15)}")
        assert isinstance(reply, expected), reply
        return reply

    def __enter__(self) -> Self:
        return self if self._process is not None else self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
