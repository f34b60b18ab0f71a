"""Metrics of the bucket."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from remote_server.protocol import BucketStats

_P = "kvferry_bucket_"

DECLINES = ("declined_", "write_io_error", "write_cleared")
"""Rows that were not written, by reason; they are among the declined blocks of all tiers."""

_PACKS = {
    "packs_written": "written",
    "packs_existed": "existed",
    "packs_read": "read",
    "hedged": "hedged",
    "hedge_won": "hedge_won",
    "read_unused": "unused",
    "dropped_absent": "gone",
    "swept_packs": "swept",
    "renewed": "renewed",
    "renew_failed": "renew_failed",
}
_HEADERS = ("read", "absent", "damaged", "version", "codec", "too_large", "declined")
_ROWS = (
    "demoted", "written", "read", "read_failed", "read_late", "read_stuck", "promoted",
    "promote_failed", "promote_no_slot", "promote_misfit", "lost", "removed", "cleared", "expired",
)  # fmt: skip
_EVENTS = ("pauses", "lookups_refused", "listed", "sweeps")


def bucket_families(stats: BucketStats | None, counters: Mapping[str, int]) -> Iterator[Metric]:
    """Every metric of the bucket; without one, families without samples."""
    counters = {
        name.removeprefix("bucket_"): count
        for name, count in counters.items()
        if stats is not None and name.startswith("bucket_")
    }
    yield from _calls(stats)
    packs = _counter("packs", "Events of packs.", "event")
    for name, event in _PACKS.items():
        _add(packs, event, counters, name)
    yield packs
    headers = _counter("headers", "Headers that lookups had read, by result.", "result")
    for result in _HEADERS:
        _add(headers, result, counters, f"headers_{result}")
    yield headers
    rows = _counter(
        "rows",
        "Events of rows; `fetched` ones came with the packs that were read.",
        "event",
    )
    for event in _ROWS:
        _add(rows, event, counters, event)
    _add(rows, "fetched", counters, "rows_fetched")
    yield rows
    events = _counter("events", "Events of the whole bucket.", "event")
    for event in _EVENTS:
        _add(events, event, counters, event)
    yield events
    yield from _state(stats)


def _calls(stats: BucketStats | None) -> Iterator[Metric]:
    requests = CounterMetricFamily(
        _P + "requests",
        "Calls of the object store: `ok`, `existed`, or the reason of their failure.",
        labels=["op", "result"],
    )
    moved = _counter("bytes", "Bytes of bodies sent by puts and received by reads.", "op")
    times = HistogramMetricFamily(
        _P + "seconds", "Duration of a call of the object store.", labels=["op"]
    )
    for kind, calls in stats.calls.items() if stats is not None else ():
        for result, count in sorted(({"ok": 0} | calls.results).items()):
            requests.add_metric([kind, result], count)
        if kind in ("put", "get", "header"):
            moved.add_metric([kind], calls.num_bytes)
        times.add_metric([kind], calls.times.for_prometheus(), calls.times.sum_s)
    yield requests
    yield moved
    yield times


def _state(stats: BucketStats | None) -> Iterator[Metric]:
    paused = GaugeMetricFamily(
        _P + "paused_seconds",
        "For how long the store has been left alone because its calls fail; 0: it is called.",
    )
    names = GaugeMetricFamily(_P + "names", "Packs that are known to be in the bucket.")
    waiting = GaugeMetricFamily(_P + "packs_waiting", "Packs that wait to be written.")
    writable = GaugeMetricFamily(
        _P + "writable_bytes", "What the write rate allows now; absent where it has no limit."
    )
    if stats is not None:
        paused.add_metric([], stats.paused_s)
        names.add_metric([], stats.names)
        waiting.add_metric([], stats.packs_waiting)
        if stats.writable_bytes is not None:
            writable.add_metric([], stats.writable_bytes)
    yield from (paused, names, waiting, writable)


def _counter(name: str, text: str, label: str) -> CounterMetricFamily:
    return CounterMetricFamily(_P + name, text, labels=[label])


def _add(family: CounterMetricFamily, label: str, counters: Mapping[str, int], name: str) -> None:
    if name in counters:
        family.add_metric([label], counters[name])
