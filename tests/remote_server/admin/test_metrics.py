"""The server's /metrics, and that documents and dashboard name metrics that exist."""

import asyncio
import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from handler_bench import HandlerBench
from metrics_helpers import OPERATIONS, TIER, a_snapshot
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from wire_peer import key

from remote_server import protocol
from remote_server.admin.exposition import exposition, families, largest
from remote_server.histograms import BOUNDS_S, percentile
from remote_server.protocol import Get, Hello, Lookup, Put, Release
from remote_server.server import meters
from remote_server.server.meters import MAX_NAMESPACES, OTHER, QUIET_S, Traffic
from remote_server.server.reports.snapshot import Held
from remote_server.store.bucket.objects.objects import Failure

pytestmark = [pytest.mark.real_time, pytest.mark.usefixtures("no_old_answers")]

REPOSITORY = Path(__file__).resolve().parents[3]
DASHBOARD = REPOSITORY / "examples" / "grafana" / "kvferry.json"


def rows_of(title: str) -> set[str]:
    """The table of one section of docs/metrics.md."""
    text = (REPOSITORY / "docs" / "metrics.md").read_text()
    section = text.split(f"## {title}\n")[1].split("\n## ")[0]
    return {line for line in section.splitlines() if line.startswith("| `")}


def row_of(family: Metric) -> str:
    labels: dict[str, None] = {}
    for sample in family.samples:
        labels |= dict.fromkeys(label for label in sample.labels if label != "le")
    name = family.name + ("_total" if family.type == "counter" else "")
    names = ", ".join(f"`{label}`" for label in labels)
    return f"| `{name}` | {family.type} | {names} | {family.documentation} |"


def test_every_metric_of_the_server_is_documented_as_it_is_and_every_documented_one_exists():
    there = {row_of(family) for family in families(a_snapshot(), {"token": 1})}
    assert rows_of("The server") == there


async def test_a_real_server_shows_the_documented_metrics_and_those_of_its_process(http):
    text = (await http.get("/metrics"))[2]
    shown = {family.name for family in text_string_to_metric_families(text)}
    expected = {family.name for family in families(a_snapshot(), {})}
    assert {name for name in shown if not name.startswith("process_")} == expected
    assert "process_resident_memory_bytes" in shown


def names_in(expression: str) -> Iterable[str]:
    outside = re.sub(r'\{[^}]*\}|"[^"]*"|\[[^\]]*\]', "", expression)
    return re.findall(r"\b(?:kvferry|process)_\w+", outside)


def test_every_metric_in_the_dashboard_exists_on_one_side_or_the_other():
    documented = {}
    for row in rows_of("The server") | rows_of("The engine"):
        _, name, kind, labels, *_ = (cell.strip(" `") for cell in row.split("|"))
        documented[name] = (kind, {label.strip(" `") for label in labels.split(",")})
    histograms = [name for name, (kind, _) in documented.items() if kind == "histogram"]
    series = {name: labels for name, (kind, labels) in documented.items() if kind != "histogram"}
    for name in histograms:
        for suffix in ("_bucket", "_sum", "_count"):
            series[name + suffix] = documented[name][1] | {"le"}
    series["process_resident_memory_bytes"] = set()
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert len(expressions) > 30
    for expression in expressions:
        used = [*names_in(expression)]
        assert used, expression
        assert set(used) <= set(series), expression
        grouped = re.findall(r"by \(([^)]*)\)", expression)
        for label in {one.strip() for group in grouped for one in group.split(",")}:
            assert all(label in series[name] | {"instance"} for name in used), (label, expression)
        for label in re.findall(r'(\w+)=~?"', expression):
            assert all(label in series[name] | {"instance"} for name in used), (label, expression)
    for panel in panels:
        for target in panel.get("targets", ()):
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                by = re.findall(r"by \(([^)]*)\)", target["expr"])
                known = by[-1] if by else "instance tier"
                assert label in known, (panel["title"], label)


# ── names that come from outside ─────────────────────────────────────────────────────────


def test_any_namespace_makes_a_page_that_can_be_parsed_and_names_it():
    nasty = ['quote"', "back\\slash", "new\nline", "\x00", "}{ 1\nkvferry_fake 1", "ü", OTHER]
    stats = a_snapshot().namespaces["model-0000-3f9a6c21b7d4e805"]
    snapshot = a_snapshot(
        namespaces=dict.fromkeys(nasty, stats), traffic={name: Traffic() for name in nasty}
    )
    text = asyncio.run(exposition(snapshot, {})).decode()
    found = {
        sample.labels["namespace"]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "kvferry_server_namespace_blocks"
    }
    assert found == set(nasty)
    assert "\nkvferry_fake" not in text
    lines = [line.rsplit(" ", 1)[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(lines) == len(set(lines)), "a series that is there twice fails the whole scrape"


def test_what_fifty_namespaces_hold_is_named_and_the_rest_is_added_up():
    many = a_snapshot(num_namespaces=MAX_NAMESPACES + 20).namespaces
    many[OTHER] = many["model-0069-3f9a6c21b7d4e805"]
    rows = largest(many)
    assert len(rows) == MAX_NAMESPACES + 1
    assert rows[OTHER].share("disk").blocks == sum(range(20)) + 69
    assert sum(one.total.used_bytes for one in rows.values()) == sum(
        one.total.used_bytes for one in many.values()
    )
    assert "model-0019-3f9a6c21b7d4e805" not in rows
    assert largest({}) == {}


# ── what is counted ──────────────────────────────────────────────────────────────────────


class Metered(HandlerBench):
    def __init__(self) -> None:
        super().__init__()
        self.ids = itertools.count(1)

    def send(self, kind: type, *payload: bytes, **fields: object) -> None:
        request = kind(request_id=next(self.ids), **fields)
        self.handle(b"c", [*protocol.encode(request), *payload])

    def hello(self, namespace: str) -> None:
        self.send(Hello, protocol=2, namespace=namespace, block_bytes=4096)

    def put(self, namespace: str, numbers: range, **fields: object) -> None:
        keys = [key(n) for n in numbers]
        self.send(
            Put, bytes(100 * len(keys)), namespace=namespace, keys=keys, lengths=[100] * len(keys),
            checksums=[], blocks_per_frame=len(keys), **fields,
        )  # fmt: skip

    def count(self, operation: str) -> tuple[int, float]:
        timings = self.meters.timings()[operation]
        return sum(timings.counts), timings.sum_s


@pytest.fixture
def bench():
    bench = Metered()
    yield bench
    bench.close()


def test_a_request_is_timed_until_it_is_answered_however_late_that_is(bench):
    bench.hello("ns")
    bench.put("ns", range(4), deferred=False)
    assert bench.count("put") == (0, 0.0)
    assert len(bench.meters.open) == 1
    bench.now += 0.3
    bench.turn()
    assert bench.count("put") == (1, pytest.approx(0.3))
    assert not bench.meters.open
    bench.put("ns", range(4, 8), deferred=True)
    assert bench.count("put")[0] == 2


def test_a_streamed_get_is_timed_twice_its_answer_and_its_last_block(bench):
    bench.hello("ns")
    bench.put("ns", range(4))
    bench.turn()
    bench.router.full.add(b"c")
    bench.turn()
    bench.send(Get, namespace="ns", keys=[key(n) for n in range(6)], stream=True)
    assert bench.count("get") == (1, 0.0)
    bench.now += 0.2
    bench.turn()
    assert bench.count("stream") == (0, 0.0)
    bench.settle()
    assert bench.count("stream") == (1, pytest.approx(0.2))
    traffic = bench.meters.traffic()["ns"]
    assert (traffic.get_hit, traffic.get_miss) == (4, 2)
    assert (traffic.bytes_in, traffic.bytes_out) == (400, 400)


def test_what_is_refused_is_answered_too_and_a_release_is_not(bench):
    bench.put("undeclared", range(1))
    assert bench.count("put")[0] == 1
    bench.send(Release, lease=5)
    bench.handle(b"c", [b"nonsense"])
    bench.handle(b"c", [protocol.MAGIC, b"\xff"])
    assert not bench.meters.open
    assert sum(bench.count(name)[0] for name in bench.meters.timings()) == 1


def test_every_operation_of_the_wire_has_a_histogram(bench):
    assert set(bench.meters.timings()) == {*OPERATIONS}


def test_keys_of_lookups_are_counted_as_hit_pending_and_miss_for_their_namespace(bench):
    bench.hello("ns")
    bench.put("ns", range(2))
    bench.turn()
    bench.put("ns", range(2, 5))  # not copied yet
    bench.send(Lookup, namespace="ns", keys=[key(n) for n in range(9)])
    traffic = bench.meters.traffic()["ns"]
    assert (traffic.lookup_hit, traffic.lookup_pending, traffic.lookup_miss) == (2, 3, 4)
    assert bench.meters.pending_keys == 3
    bench.turn()


def test_fifty_namespaces_are_counted_by_name_the_others_together_until_one_is_quiet(bench):
    for name in ("undeclared", OTHER):
        bench.send(Lookup, namespace=name, keys=[b"k"])
    for n in range(MAX_NAMESPACES + 5):
        bench.store.namespaces.known[f"ns-{n}"] = None
        bench.now += 1
        bench.send(Lookup, namespace=f"ns-{n}", keys=[b"k", b"l"])
    traffic = bench.meters.traffic()
    assert len(traffic) == MAX_NAMESPACES + 1
    assert traffic[OTHER].lookup_miss == 2 * 5 + 2
    bench.now += QUIET_S - MAX_NAMESPACES
    bench.send(Lookup, namespace="ns-0", keys=[b"k"])
    bench.now += MAX_NAMESPACES - 5
    bench.send(Lookup, namespace="ns-52", keys=[b"k"])
    traffic = bench.meters.traffic()
    assert len(traffic) == MAX_NAMESPACES + 1
    assert traffic["ns-52"].lookup_miss == 1 and traffic["ns-0"].lookup_miss == 3
    assert "ns-1" not in traffic, "the one that was quiet for the longest gave its place"
    bench.store.namespaces.known.clear()


def test_requests_that_nobody_answers_are_forgotten_in_the_end(bench, monkeypatch):
    monkeypatch.setattr(meters, "MAX_OPEN", 3)
    bench.hello("ns")
    for n in range(5):
        bench.put("ns", range(n, n + 1), deferred=False)
    assert len(bench.meters.open) == 3
    bench.turn()
    assert not bench.meters.open


def test_percentiles_lie_within_the_bucket_that_holds_them():
    counts = [0] * (len(BOUNDS_S) + 1)
    assert percentile(counts, 50) is None
    counts[3] = 10
    assert BOUNDS_S[2] < percentile(counts, 50) < BOUNDS_S[3]
    assert percentile(counts, 100) == BOUNDS_S[3]
    counts[-1] = 1
    assert percentile(counts, 99) == BOUNDS_S[-1]
    counts[0] = 89
    assert percentile(counts, 50) < BOUNDS_S[0]


def test_a_tier_is_shown_with_every_figure_that_it_has():
    shown = {
        family.name.removeprefix("kvferry_server_tier_"): family.samples[0].value
        for family in families(a_snapshot(), {})
        if family.name.startswith("kvferry_server_tier_") and family.type == "gauge"
    }
    assert shown == {name: getattr(TIER, name) for name in type(TIER).__struct_fields__}


def test_what_connections_hold_is_shown_with_every_kind_that_it_has():
    kinds = {"gathered": 5, "replies": 4, "streams": 3, "uncopied": 2}
    by_one = {("", kind): value for kind, value in kinds.items()}
    assert shown(a_snapshot(), "held_by_one_bytes") == by_one
    assert shown(a_snapshot(), "held_bytes") == by_one | {("", "fingerprints"): 1}
    assert {*Held.__struct_fields__} == {*kinds, "fingerprints", "largest"}


def test_every_counter_of_the_server_is_shown_somewhere():
    """Each counter in turn is changed, and the page must change with it."""
    plain = a_snapshot()
    sums = {
        "put_total", "get_total", "disk_demote_declined",  # shown by their parts
        "bucket_demote_declined", "bucket_names",  # the same as `BucketStats` has
        "bucket_written_bytes", "bucket_written_plain_bytes", "bucket_read_bytes",
        *(f"bucket_failed_{failure}" for failure in Failure),
    }  # fmt: skip

    def page(snapshot) -> list[float]:
        return [s.value for family in families(snapshot, {}) for s in family.samples]

    before = page(plain)
    unseen = {
        name
        for name in plain.counters
        if page(a_snapshot(counters=plain.counters | {name: 1000})) == before
    }
    assert unseen == sums


def shown(snapshot, name: str) -> dict[tuple[str, ...], float]:
    (family,) = [one for one in families(snapshot, {}) if one.name == f"kvferry_server_{name}"]
    return {tuple(sample.labels.values()): sample.value for sample in family.samples}


def test_the_name_and_how_many_lists_engines_have_are_shown():
    snapshot = a_snapshot(name="kvferry-3", fleets={"ab": ["one"], "cd": ["two"]})
    ((labels, _),) = shown(snapshot, "info").items()
    assert "kvferry-3" in labels
    assert shown(snapshot, "lists") == {(): 2}


def test_what_memory_does_not_have_is_its_miss_though_the_disk_may_have_it():
    counters = a_snapshot().counters | {"hits_memory": 1, "hits_disk": 20, "get_miss": 300}
    gets = shown(a_snapshot(counters=counters, tiers={"memory": TIER, "disk": TIER}), "tier_gets")
    assert gets == {
        ("memory", "hit"): 1, ("memory", "miss"): 320, ("disk", "hit"): 20, ("disk", "miss"): 300
    }  # fmt: skip


def test_every_reason_to_decline_is_among_the_declined_and_no_event_is():
    reasons = {reason for tier, reason in shown(a_snapshot(), "declined_blocks") if tier == "disk"}
    assert reasons == {
        "demoted_late", "first_time", "write_rate", "no_slot", "busy", "recovering",
        "small_demand", "unlikely", "write_no_space", "write_io_error", "write_cleared",
    }  # fmt: skip
    events = {event for (event,) in shown(a_snapshot(), "disk_blocks")}
    assert not events & reasons and {"demoted", "promoted", "recovered"} <= events
