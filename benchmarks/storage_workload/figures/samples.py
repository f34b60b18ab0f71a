"""The raw measurements, one row each. Every figure of a report is computed from these alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

Row = TypeVar("Row", bound="RequestSample | TransferSample | Moment")


class RequestSample(NamedTuple):
    """A request that was answered. Times are seconds since the run began, durations seconds."""

    arrived_s: float
    ended_s: float
    user: int
    number: int
    qos: str
    persona: str
    phase: str
    turn: int
    context_tokens: int
    generation_tokens: int
    queue_s: float
    """Waits before the request began, and before its writes began."""

    storage_s: float
    """Time in reads and writes, waiting for the store's turn included."""

    generation_s: float
    system_asked: int
    """Blocks of a system prompt that it looked up; `hit` are those found."""

    system_hit: int
    history_asked: int
    """The same of its conversation so far, or of a recorded prompt."""

    history_hit: int
    document_asked: int
    document_hit: int
    system_hit_bytes: int = 0
    """Bytes of the `system_hit` blocks; the last block may be shorter."""

    @property
    def total_s(self) -> float:
        return self.ended_s - self.arrived_s

    @property
    def served_s(self) -> float:
        """The user's wait due to storage and queues."""
        return self.queue_s + self.storage_s

    @property
    def asked(self) -> int:
        return self.system_asked + self.history_asked + self.document_asked

    @property
    def hit(self) -> int:
        return self.system_hit + self.history_hit + self.document_hit


class TransferSample(NamedTuple):
    """One tier's part of one read or write."""

    ended_s: float
    user: int
    """-1 for a write behind a put, and for blocks that are stored before the run."""

    number: int
    purpose: str
    """reuse, chunk, decode; new, recompute, ingest, precondition, behind"""

    direction: str
    """read or write"""

    tier: str
    blocks: int
    num_bytes: int
    total_s: float
    device_s: float
    waited_s: float
    """Wait before the store began; not part of `total_s`."""

    @property
    def host_s(self) -> float:
        return max(0.0, self.total_s - self.device_s)


class Moment(NamedTuple):
    """The state at one time."""

    time_s: float
    users: int
    """Active users."""

    in_flight: int
    requests: int
    """Requests answered so far."""

    tokens: int
    read_bytes: int
    written_bytes: int
    used_bytes: dict[str, int]
    """By tier."""


@dataclass
class Samples:
    """One run. Only the driver adds to it."""

    requests: list[RequestSample] = field(default_factory=list)
    transfers: list[TransferSample] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    elapsed_s: float = 0.0
    """From the start of the first user to the last answer that counts."""

    num_unfinished: int = 0
    """Requests that the end of the run cut off: not among `requests`."""

    def to_json(self) -> dict[str, Any]:
        return {
            "elapsed_s": self.elapsed_s,
            "num_unfinished": self.num_unfinished,
            "requests": _table(self.requests, RequestSample),
            "transfers": _table(self.transfers, TransferSample),
            "moments": _table(self.moments, Moment),
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "Samples":
        return cls(
            [*_rows(document["requests"], RequestSample)],
            [*_rows(document["transfers"], TransferSample)],
            [*_rows(document["moments"], Moment)],
            document["elapsed_s"],
            document["num_unfinished"],
        )


def _table(rows: Sequence[Row], kind: type[Row]) -> dict[str, Any]:
    """The names once, then only values: a run has tens of thousands of rows."""
    return {"columns": kind._fields, "rows": [[*map(_rounded, row)] for row in rows]}


def _rows(table: dict[str, Any], kind: type[Row]) -> Iterator[Row]:
    if table["columns"] != [*kind._fields]:
        raise ValueError(f"columns {table['columns']}, expected {kind._fields}")
    for row in table["rows"]:
        yield kind(*row)


def _rounded(value: object) -> object:
    """Times to a tenth of a microsecond, the clock's precision; files are half as large."""
    return round(value, 7) if isinstance(value, float) else value
