"""The plan of a fleet: its figures are those of the records, and each line names its record."""

from dataclasses import replace

import pytest

from benchmarks.harness.record import Figure, Record
from benchmarks.store_sweep import plan, source
from benchmarks.store_sweep.__main__ import main
from benchmarks.store_sweep.figures import as_figure

MACHINE = {"cores": 2, "memory_gib": 24}
TARGET = ["plan", "--target-tokens-per-s", "1000000"]


def written(path, benchmark: str, figures: list[Figure], **parameters: str) -> str:
    record = Record(benchmark, "", "2026-05-06T07:08:09", machine=MACHINE, figures=figures)
    record.parameters.update(parameters)
    record.write(path)
    return str(path)


def printed(capsys, *arguments: str) -> list[str]:
    assert main([*TARGET, *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_servers_with_a_core_each_carry_more_than_beside_the_clients(tmp_path, capsys):
    result = source.results()[0]
    result = replace(result, tps=100.0, tokens_per_s=40_000.0, server_percent=80.0)
    servers = {"servers": "4 servers on this machine, started for the sweep"}
    sweep = written(tmp_path / "s.json", "benchmarks.store_sweep", [as_figure(result)], **servers)
    beside, alone = printed(capsys, "--record", sweep)
    assert beside.startswith("100 servers for") and "each carries 10,000" in beside
    assert "as one of 4 on the clients' cores" in beside
    assert alone.startswith("by their own CPU time 20 servers") and "50,000 tokens/s" in alone
    for line in (beside, alone):
        assert "(from s.json, 2026-05-06, " in line


def test_a_fleet_with_little_room_finds_what_the_replay_found(tmp_path, capsys):
    figures = [
        Figure(f"{replay}: {number} servers, room for {room}, {event}", "%", {
            "found": found, "read, most to mean": 1.5,
        })
        for replay, number, room, event, found in (
            ("store", 1, "512.0 GiB", "nothing", 30.0),
            ("store", 11, "512.0 GiB", "nothing", 20.0),
            ("store", 11, "512.0 GiB", "one server is killed", 5.0),
            ("wire", 11, "512.0 GiB", "nothing", 6.0),
            ("store", 11, "1.0 TiB", "nothing", 7.0),
            ("store", 11, "everything", "nothing", 38.0),
        )
    ]  # fmt: skip
    fleet = written(tmp_path / "fleet.json", "benchmarks.test_trace", figures)
    lines = printed(capsys, "--per-server-tokens-per-s", "250000", "--fleet", fleet)
    assert [line.split(" (from ")[0] for line in lines] == [
        "6 servers for 1,000,000 tokens/s: each carries 250,000 as given",
        "the busiest of 6 is read 1.50 times as much as the mean",
        "with 512.0 GiB in all, 6 servers find 25.0 % and one finds 30.0 %",
    ]
    assert all("(from fleet.json, 2026-05-06, " in line for line in lines[1:])
    _, busiest, found = printed(capsys, "--per-server-tokens-per-s", "50000", "--fleet", fleet)
    assert busiest.startswith("the busiest of 30 is read 1.50 times")
    assert ", as of 11, the most measured (from" in busiest
    assert found.startswith("with 512.0 GiB in all, 11 servers find 20.0 % and one finds 30.0 %")


def test_a_fleet_costs_its_clients_what_was_measured(tmp_path, capsys):
    figures = [Figure("a client's CPU of a put", "s/GiB", {
        "1 server": 0.3, "4 servers": 0.4, "4 servers to one": 1.3, "4 servers to one, low": 1.1,
    })]  # fmt: skip
    client = written(tmp_path / "client.json", "benchmarks.test_server", figures)
    of_one = ["--per-server-tokens-per-s", "1e6", "--client", client]
    assert len(printed(capsys, *of_one)) == 1  # one server is no fleet
    _, line = printed(capsys, "--per-server-tokens-per-s", "250000", "--client", client)
    assert line.startswith("a client's CPU of a put with 4 servers: 1.30 times one server's (from ")
    none = written(tmp_path / "none.json", "benchmarks.test_server", [])
    assert main([*TARGET, "--per-server-tokens-per-s", "9", "--client", none]) == 2
    assert "no cost of a fleet" in capsys.readouterr().err


@pytest.mark.parametrize("limit", [[], ["--read-p50-ms", "8"]])
def test_the_records_of_the_repository_have_all_that_a_plan_needs(limit, capsys):
    lines = printed(capsys, "--recorded", *limit)
    assert "as one of 4 on the clients' cores" in lines[0]
    for part, record in (
        ("servers for", plan.SWEEP), ("by their own CPU time", plan.SWEEP),
        ("the busiest of", plan.FLEET), ("with 512.0 GiB in all", plan.FLEET),
        ("CPU of a put", plan.CLIENT), ("CPU of a get", plan.CLIENT),
    ):  # fmt: skip
        assert any(part in line and f"(from {record}, " in line for line in lines), (part, lines)
