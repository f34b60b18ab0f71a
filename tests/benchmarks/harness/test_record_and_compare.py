"""A record survives its file, and two records are compared only when that means something."""

import errno
import json
import os
from pathlib import Path
from typing import cast

import pytest

from benchmarks.__main__ import main
from benchmarks.harness import machine as here
from benchmarks.harness.compare import compare_records
from benchmarks.harness.record import Figure, Record, RecordError, Row
from benchmarks.harness.runner import Sample
from benchmarks.remote_kv_cache.work import ferry_client
from remote_server.client import RemoteClient
from remote_server.client.results import LaneState

MACHINE = {"cores": 2, "memory_gib": 24}


def row(values: list[float], ratio: float | None = 2.0, **fields) -> Row:
    return Row("3B", "get", 1000, Sample(values, [9.0]), "tcp", True, ratio, **fields)


def record(*rows: Row, machine=MACHINE, benchmark: str = "benchmarks.b") -> Record:
    return Record(benchmark, f"python -m {benchmark}", machine=machine, rows=list(rows))


def verdict(before: Record, after: Record, **options) -> str:
    (found,) = compare_records(before, after, **options).verdicts.values()
    return found


def test_a_row_has_the_promised_names(tmp_path: Path):
    made = record(row([1.0, 3.0, 2.0], wall="raw", ratio_to_wall=1.5))
    made.figures.append(Figure("lookup", "ms", {"p99": 1.25}, "tcp"))
    made.write(tmp_path / "a.json")
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["rows"] == [
        {
            "model": "3B", "operation": "get", "transport": "tcp", "integrity": True,
            "seconds": {"median": 2.0, "min": 1.0, "max": 3.0}, "gb_per_s": 5e-7,
            "ratio_to_memcpy": 2.0, "bytes": 1000, "values": [1.0, 3.0, 2.0], "warm_ups": [9.0],
            "wall": "raw", "ratio_to_wall": 1.5,
        }
    ]  # fmt: skip
    assert document["machine"] == MACHINE
    assert {"python", "numpy", "pyzmq", "libzmq"} <= document["versions"].keys()


def test_a_record_is_read_back_as_it_was(tmp_path: Path):
    made = record(row([1.0, 2.0]), Row("3B", "swap in", 1000, Sample(skipped="no GPU")))
    made.figures.append(Figure("lookup", "ms", {"p99": 1.25}))
    made.write(tmp_path / "a.json")
    assert Record.read(tmp_path / "a.json") == made


def test_where_the_output_goes_is_no_part_of_the_command():
    argv = ["--trials", "3", "--json", "a.json", "--plot=x.svg", "--models", "3B"]
    assert Record.begin("benchmarks.b", argv).command == (
        "python -m benchmarks.b --trials 3 --models 3B"
    )


def test_a_row_without_numbers_says_why():
    assert row([1.0]).reason == ""
    assert Row("m", "o", 1, Sample(skipped="no GPU")).reason == "SKIPPED: no GPU"
    assert Row("m", "o", 1, Sample([1.0], failed="wrong bytes")).reason == "FAILED: wrong bytes"
    assert Row("m", "o", 1, Sample()).reason == "not measured: interrupted"
    assert Row("m", "o", 1, Sample([1.0], failed="wrong bytes")).to_json()["seconds"] is None


def test_what_cannot_be_compared_is_not():
    here, there = record(row([1.0])), record(row([1.0]), machine={"cores": 4, "memory_gib": 24})
    found = compare_records(here, there)
    assert not found.comparable
    assert found.text == ("different machines, not compared: 2 cores, 24 GiB and 4 cores, 24 GiB")
    here.host, there = {"cpu": "one"}, record(row([1.0]))
    assert compare_records(here, there).comparable, "an older record does not name it"
    there.host = {"cpu": "other"}
    assert "24 GiB, one and 2 cores, 24 GiB, other" in compare_records(here, there).text
    assert not compare_records(here, record(row([1.0]), benchmark="benchmarks.c")).comparable
    skipped = record(Row("3B", "get", 1000, Sample(skipped="no GPU"), "tcp", True))
    assert verdict(here, skipped) == "not compared: SKIPPED: no GPU"
    assert verdict(here, record()) == "only in the first"
    assert verdict(record(), here) == "only in the second"
    more = record(Row("3B", "get", 2000, Sample([1.0]), "tcp", True))
    assert verdict(here, more) == "different amounts, not compared"


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    record(row([1.0] * 5)).write(first)
    record(row([1.0] * 5), machine={"cores": 64, "memory_gib": 512}).write(second)
    fast = [0.5, 0.51, 0.52, 0.53, 0.54]
    record(row(fast, ratio=1.0)).write(tmp_path / "fast.json")
    record(row([2 * value for value in fast], ratio=1.0)).write(tmp_path / "slow.json")
    slow_then_fast = ["compare", str(tmp_path / "slow.json"), str(tmp_path / "fast.json")]
    assert main(slow_then_fast) == 0
    assert "2.00x faster" in capsys.readouterr().out
    assert main([*slow_then_fast, "--ratios"]) == 0
    shown = capsys.readouterr().out
    assert "not significant" in shown and "before (memcpys)" in shown
    assert main(["compare", str(first), str(first)]) == 0
    assert "not significant" in capsys.readouterr().out
    assert main(["compare", str(first), str(second)]) == 2
    assert "different machines, not compared" in capsys.readouterr().out
    assert main(["compare", str(first), str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err


def figures_of(per_second: list[float], ms: list[float]) -> Record:
    rounds = {"tokens per second": per_second, "read p50, ms": ms}
    values = {name: of[0] for name, of in rounds.items()}
    figure = Figure("8 at once", "as named", values, "tcp", rounds)
    return Record("b", "c", machine=MACHINE, figures=[figure])


def test_figures_with_rounds_get_a_verdict_in_the_direction_of_their_unit():
    """Of a sweep or a workload: more tokens a second are faster, more milliseconds slower."""
    ten, twenty = [10.0, 10.1, 10.2, 10.3, 10.4], [20.0, 20.1, 20.2, 20.3, 20.4]
    text = compare_records(figures_of(ten, ten), figures_of(twenty, twenty)).text
    lines = [line.split("  ") for line in text.splitlines() if "8 at once" in line]
    assert "x faster" in lines[0][-1] and "x slower" in lines[1][-1]
    found = compare_records(figures_of(ten, ten), figures_of(twenty, twenty))
    assert found.slower == ["8 at once, read p50, ms, tcp"]
    assert compare_records(figures_of(ten, ten), figures_of(ten, ten)).slower == []
    few = compare_records(figures_of(ten[:3], ten[:3]), figures_of(twenty[:3], twenty[:3]))
    assert few.slower == [] and few.text.count("not judged: 3 rounds") == 2


@pytest.mark.parametrize(
    ("unit", "is_rate"),
    [("tokens/s", True), ("GB/s", True), ("keys/s", True), ("%", True),
     ("ms", False), ("s", False), ("us", False), ("s/GiB", False)],
)  # fmt: skip
def test_a_larger_rate_is_faster_whatever_it_counts(unit: str, is_rate: bool) -> None:
    """The `s` of `tokens/s` was taken for a duration: twice the rate was called slower."""

    def made(values: list[float]) -> Record:
        figure = Figure("throughput", unit, {"": values[0]}, rounds={"": values})
        return Record("b", "c", machine=MACHINE, figures=[figure])

    ten, twenty = [10.0, 10.1, 10.2, 10.3, 10.4], [20.0, 20.1, 20.2, 20.3, 20.4]
    assert (compare_records(made(ten), made(twenty)).slower == []) is is_rate
    assert (compare_records(made(twenty), made(ten)).slower == []) is not is_rate


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_rounds_that_are_no_durations_are_named_and_not_judged(value: float) -> None:
    """They ended in a traceback, with the exit status of `slower`."""
    good, bad = [1.0, 1.1, 1.2, 1.3, 1.4], [value, 1.1, 1.2, 1.3, 1.4]
    for pair in ((good, bad), (bad, good)):
        assert verdict(*(record(row(values)) for values in pair)).startswith(
            "not compared: a round"
        )
        found = compare_records(*(figures_of(values, good) for values in pair))
        assert "not judged: a round is no number above 0" in found.text
        assert not found.slower and "one number of each run" not in found.text


def test_a_row_whose_values_are_no_numbers_is_no_record(tmp_path: Path) -> None:
    record(row([1.0])).write(tmp_path / "a.json")
    document = json.loads((tmp_path / "a.json").read_text())
    document["rows"][0]["values"] = ["1.0"]
    (tmp_path / "a.json").write_text(json.dumps(document))
    with pytest.raises(RecordError, match="no list of numbers"):
        Record.read(tmp_path / "a.json")


def test_figures_without_rounds_have_no_verdict_and_say_why():
    one = Record("b", "c", machine=MACHINE, figures=[Figure("f", "GB/s", {"": 1.0})])
    two = Record("b", "c", machine=MACHINE, figures=[Figure("f", "GB/s", {"": 2.0})])
    text = compare_records(one, two).text
    assert "+100.0 %" in text and "without a verdict: one number of each run" in text
    assert compare_records(one, two).slower == []


def test_compare_ends_with_1_where_the_second_is_slower(tmp_path, capsys):
    fast = [0.5, 0.51, 0.52, 0.53, 0.54]
    record(row(fast)).write(tmp_path / "fast.json")
    record(row([2 * value for value in fast])).write(tmp_path / "slow.json")
    assert main(["compare", str(tmp_path / "fast.json"), str(tmp_path / "slow.json")]) == 1
    assert "slower in the second: 3B, get, tcp, checksums on" in capsys.readouterr().out


def test_compare_ends_with_1_where_the_second_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A build that holds a line passed when its rows were no longer right."""
    broken = record(Row("3B", "get", 1000, Sample([1.0], failed="wrong bytes"), "tcp", True))
    record(row([1.0] * 5)).write(tmp_path / "good.json")
    broken.write(tmp_path / "broken.json")
    good, bad = (str(tmp_path / f"{name}.json") for name in ("good", "broken"))
    assert main(["compare", good, bad]) == 1
    assert "FAILED in the second: 3B, get, tcp, checksums on" in capsys.readouterr().out
    assert main(["compare", bad, good]) == main(["compare", bad, bad]) == 0


def test_compare_names_an_interrupted_record() -> None:
    one, other = record(row([1.0] * 5)), record(row([1.0] * 5))
    other.interrupted = True
    text = compare_records(one, other).text
    assert "interrupted: the second" in text and "the first" not in text


def test_a_record_names_what_carried_its_blocks(tmp_path):
    """`tcp` was ZeroMQ before there were lanes, and both stood in tables under one name."""
    made = record(row([1.0]))
    made.figures.append(Figure("f", "GB/s", {"": 1.0}, "shm"))
    made.write(tmp_path / "a.json")
    document = json.loads((tmp_path / "a.json").read_text())
    assert {*document["channels"]} == {"tcp", "shm"} and "lanes" in document["channels"]["tcp"]
    assert Record.read(tmp_path / "a.json").names_channels
    del document["channels"]
    (tmp_path / "a.json").write_text(json.dumps(document))
    assert not Record.read(tmp_path / "a.json").names_channels


def test_a_client_without_an_open_lane_is_not_measured_as_tcp():
    class Client:
        transport = "tcp"
        lanes = LaneState(0, "the server offers none")

    client = cast("RemoteClient", Client())
    assert not ferry_client._uses(client, "tcp")
    assert ferry_client._uses(client, ferry_client.OVER_ZMQ)
    Client.lanes = LaneState(2, "")
    assert ferry_client._uses(client, "tcp")


def test_a_record_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    record(row([1.0])).write(file)
    before = file.read_bytes()

    def full(path, text):
        with path.open("w") as half:
            half.write(text[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space"):
            record(row([2.0])).write(file)
    assert file.read_bytes() == before and [*tmp_path.iterdir()] == [file]
    link = tmp_path / "link.json"
    link.symlink_to(file)
    record(row([2.0])).write(link)
    assert link.is_symlink() and Record.read(file).rows[0].sample.values == [2.0]


def test_a_record_may_go_to_what_is_no_file(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    record(row([1.0])).write(fifo)
    assert os.read(reader, 10).startswith(b"{")
    os.close(reader)


def test_a_figure_keeps_its_rounds(tmp_path):
    made = figures_of([1.0, 2.0], [3.0, 4.0])
    made.write(tmp_path / "a.json")
    assert Record.read(tmp_path / "a.json").figures == made.figures


def test_a_record_says_how_much_the_host_took(monkeypatch, tmp_path):
    times = iter([here.CpuTimes(1000, 10, 0), here.CpuTimes(1200, 15, 0)])
    monkeypatch.setattr(here, "cpu_times", lambda: next(times))
    record = Record("b", "command", _begun=here.cpu_times())
    record.end()
    assert record.stolen_percent == 2.5
    record.write(tmp_path / "a.json")
    assert Record.read(tmp_path / "a.json").stolen_percent == 2.5


@pytest.mark.parametrize(
    "content",
    ["", "[1]", "\0", "{}", {"figures": 5}, {"machine": {}}, {"machine": []}, {"rows": [{}]},
     {"figures": [{"name": "x", "unit": "y", "values": "z"}]}, {"rows": "x"}, {"parameters": 1},
     {"schema": 2}, "[" * 100_000,
     {"figures": [{"name": "x", "unit": "s", "values": {}, "rounds": {"p50": 3}}]},
     {"figures": [{"name": "x", "unit": "s", "values": {}, "rounds": {"p50": ["a"]}}]}],
)  # fmt: skip
def test_what_is_no_record_or_only_looks_like_one_is_refused_with_its_name(tmp_path, content):
    file = tmp_path / "a.json"
    record().write(file)
    if isinstance(content, dict):  # a change of a record
        content = json.dumps(json.loads(file.read_text()) | content)
    file.write_text(content)
    with pytest.raises(RecordError, match=r"a\.json"):
        Record.read(file)
