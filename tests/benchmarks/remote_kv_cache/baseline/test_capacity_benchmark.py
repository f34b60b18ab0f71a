"""The capacity of a server's loop: what is measured is written, and engines follow from it."""

from pathlib import Path

import pytest

from benchmarks.harness.record import Figure, Record
from benchmarks.remote_kv_cache.baseline import test_capacity as capacity
from benchmarks.remote_kv_cache.baseline.capacity import costs, engines, saturation
from benchmarks.remote_kv_cache.baseline.capacity.costs import (
    BLOCKS,
    GET,
    LARGE,
    LARGE_BLOCKS,
    LOOKUP_ABSENT,
    LOOKUP_FOUND,
    LOOKUP_KEYS,
    PUT,
    SMALL,
    Call,
    Cost,
)
from remote_server.client.lanes.opening import why_slow
from remote_server.values import MiB

LOAD = engines.Load(2.0, prompt_tokens=1600, output_tokens=32, step_tokens=800, block_tokens=16)


def linear(base: float, each: float) -> dict[Call, Cost]:
    """Each call over tcp takes `base`, and `each` for a key or block, also with large blocks."""
    numbers = {LOOKUP_FOUND: LOOKUP_KEYS, LOOKUP_ABSENT: LOOKUP_KEYS, PUT: BLOCKS, GET: BLOCKS}
    found = {
        Call(operation, number, "tcp"): Cost(base + number * each, 1)
        for operation, several in numbers.items()
        for number in several
    }
    for operation in (PUT, GET):
        large = Call(operation, LARGE_BLOCKS, "tcp", LARGE)
        found[large] = Cost(2 * base + LARGE_BLOCKS * each, 2)
    return found


def table(of: dict[Call, Cost], found: float) -> dict[str, Figure]:
    figures = engines.table_of(of, ["tcp"], LOAD, [found])
    return {figure.name.partition(": ")[2]: figure for figure in figures}


def test_a_request_takes_the_loop_what_its_messages_and_blocks_take():
    """100 blocks of 2 MiB, half of them found: a lookup of 100 keys, a get and a put of 50 blocks,
    and two puts of one. The 100 MiB are three messages of a get, of a third of 128 MiB each at
    most, and four of a put, of a quarter each."""
    llama = table(linear(100.0, 2.0), 0.5)["Llama-3.1-8B, 50% found"].values
    lookup, get, put = 100 + 100 * 2, 3 * 100 + 50 * 2, 4 * 100 + 50 * 2
    answer = 2 * (100 + 2)
    assert llama[engines.LOOP] == pytest.approx((lookup + get + put + answer) / 1e3)
    assert llama[engines.SHARE] == pytest.approx(2 * llama[engines.LOOP] / 1e3)
    assert llama[engines.ENGINES] == pytest.approx(0.7 / llama[engines.SHARE])
    bytes_per_s = llama[engines.ENGINES] * 2 * 102 * 2 * MiB
    assert llama[engines.RATE] == pytest.approx(bytes_per_s / 1e9)


def test_messages_that_move_more_bytes_have_their_own_cost():
    costly = linear(100.0, 2.0)
    large = Call(GET, LARGE_BLOCKS, "tcp", LARGE)
    costly[large] = costly[large]._replace(loop=costly[large].loop + 2 * 50)
    (name,) = [name for name in table(costly, 1.0) if name.startswith("Llama")]
    more = table(costly, 1.0)[name].values[engines.LOOP]
    less = table(linear(100.0, 2.0), 1.0)[name].values[engines.LOOP]
    messages = engines.messages_of(100 * LARGE, GET, "tcp")
    assert more - less == pytest.approx(messages * 50 / 1e3)


def test_the_cost_of_a_message_and_of_each_block_is_what_was_measured():
    costly = linear(100.0, 2.0)
    large = Call(PUT, LARGE_BLOCKS, "tcp", LARGE)
    costly[large] = costly[large]._replace(loop=costly[large].loop + 2 * 50)
    lines = {figure.name: figure.values for figure in engines.lines_of(costly, ["tcp", "shm"])}
    assert len(lines) == 4, "nothing was measured over shm"
    assert lines["message of a put"] == pytest.approx(
        {engines.MESSAGE: 100, engines.EACH: 2, engines.OF_BYTES: 150}
    )
    assert lines["message of a lookup, found"] == pytest.approx(
        {engines.MESSAGE: 100, engines.EACH: 2}
    )


def test_a_cost_that_was_not_measured_gives_no_engines():
    without = linear(100.0, 2.0)
    del without[Call(PUT, 1, "tcp")]
    assert table(without, 0.5) == {}
    assert engines.table_of(linear(1.0, 1.0), ["tcp", "shm"], LOAD, [0.5])[-1].transport == "tcp"


@pytest.mark.parametrize(
    ("share", "busy", "bound"),
    [(0.95, 0.95, "the loop"), (0.5, 0.95, "the machine's cores"), (0.5, 0.5, "round trips")],
)
def test_a_point_names_its_bound(share: float, busy: float, bound: str):
    point = Figure("", "", {saturation.SHARE: share, saturation.BUSY: busy})
    assert saturation.bound_of(point) == bound


@pytest.mark.real_time
def test_the_capacity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(costs, "_MEMORY", {SMALL: 16 * MiB, LARGE: 128 * MiB})
    monkeypatch.setattr(costs, "_SNAPSHOT_S", 0.12)
    file = tmp_path / "a.json"
    transport = "shm" if why_slow() else "tcp"
    small = ["--trials", "1", "--warm-ups", "0", "--operations", "3", "--clients", "2"]
    chosen = ["--found", "0.5", "--transport", transport]
    files = ["--json", str(file), "--plot", str(tmp_path / "a.svg")]
    assert capacity.main([*small, *chosen, *files]) == 0
    assert "<svg" in (tmp_path / "a.svg").read_text()
    record = Record.read(file)
    figures = {(figure.name, figure.transport): figure.values for figure in record.figures}
    for operation in ("put", "get"):
        for blocks in ("1 block", "8 blocks", "64 blocks"):
            cost = figures[f"{operation}: {blocks}", transport]
            assert cost["loop"] > 0 and cost["messages"] == 1
        assert figures[f"{operation}: 8 blocks of 2.0 MiB", transport]["messages"] >= 1
    for found in ("found", "not found"):
        assert figures[f"lookup, {found}: 1,000 keys", transport]["messages"] == 1
    moved = figures["2 clients: puts and gets of 8 blocks", transport]
    assert moved["calls a second"] > 0 and moved["loop's share of a core"] > 0
    assert figures["engines: Llama-3.1-8B, 50% found", transport]["engines"] > 0
    printed = capsys.readouterr().out
    assert "8,192 prompt tokens" in printed and "bound by" in printed
    assert max(map(len, printed.splitlines())) <= 200
