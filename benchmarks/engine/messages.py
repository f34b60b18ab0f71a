"""Messages between a benchmark and the process of its engine: one order, one reply."""

from typing import Any

import msgspec

from benchmarks.engine.driver import Batch, Counters, EngineSettings, Request, Span


class Start(msgspec.Struct, frozen=True, tag=True):
    settings: EngineSettings


class Run(msgspec.Struct, frozen=True, tag=True):
    requests: list[Request]


class AskCounters(msgspec.Struct, frozen=True, tag=True): ...


class Settle(msgspec.Struct, frozen=True, tag=True):
    timeout_s: float


class Forget(msgspec.Struct, frozen=True, tag=True):
    pool: bool


class LimitStep(msgspec.Struct, frozen=True, tag=True):
    tokens: int


class TakeSpans(msgspec.Struct, frozen=True, tag=True): ...


Order = Start | Run | AskCounters | Settle | Forget | LimitStep | TakeSpans


class Done(msgspec.Struct, frozen=True, tag=True):
    seconds: float


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The order was not carried out; `reason` is for display."""

    reason: str
    skipped: bool = False
    """The order cannot be carried out on this machine; this is not a failure."""


class Ran(msgspec.Struct, frozen=True, tag=True):
    batch: Batch


class Counted(msgspec.Struct, frozen=True, tag=True):
    counters: Counters


class Spans(msgspec.Struct, frozen=True, tag=True):
    spans: list[Span]


Reply = Done | Failed | Ran | Counted | Spans


def encode(message: Order | Reply) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_order(data: bytes) -> Order:
    order: Any = msgspec.msgpack.decode(data, type=Order)
    return order  # type: ignore[no-any-return]


def decode_reply(data: bytes) -> Reply:
    reply: Any = msgspec.msgpack.decode(data, type=Reply)
    return reply  # type: ignore[no-any-return]
