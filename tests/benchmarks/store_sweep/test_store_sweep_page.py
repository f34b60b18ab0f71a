"""The command, the emulated storage and the page of the sweep."""

import json
import re
import shlex
from pathlib import Path

import pytest
from browser import Browser, chromium_or_skip
from msgspec import structs
from pages import Parsed

from benchmarks.harness.record import Figure, Record
from benchmarks.store_sweep import source, spare
from benchmarks.store_sweep.__main__ import main
from benchmarks.store_sweep.figures import as_figure, read_evenness
from benchmarks.store_sweep.load.slow_server import Channels, SlowGets
from benchmarks.store_sweep.operating import servers_for, slas_for, within_slas
from benchmarks.store_sweep.pages import page
from benchmarks.store_sweep.points import Result, as_csv, read_csv
from remote_server import protocol
from remote_server.errors import ConfigError
from remote_server.server.config import ServerConfig
from remote_server.server.sending.times import RequestTimes
from remote_server.server.server import Server
from remote_server.values import MiB

pytestmark = pytest.mark.real_time

MACHINE = {"cores": 2, "memory_gib": 24}


def test_a_million_tokens_at_55_000_a_server_are_19_servers(tmp_path, capsys):
    assert servers_for(1_000_000, 55_000) == 19
    assert servers_for(110_000, 55_000) == 2
    csv, json_file = tmp_path / "sweep.csv", tmp_path / "sweep.json"
    csv.write_text(as_csv(source.results()))
    record = Record.begin("benchmarks.store_sweep", [])
    record.figures = [as_figure(result) for result in source.results()]
    record.write(json_file)
    for how in (["--csv", str(csv)], ["--record", str(json_file)], ["--source"]):
        asked = ["plan", "--target-tokens-per-s", "1000000", *how, "--read-p50-ms"]
        assert main([*asked, "25"]) == 0
        assert "19 servers for 1,000,000 tokens/s: each carries 54,800 at 8x2" in (
            capsys.readouterr().out
        )
        assert main([*asked, "10"]) == 2
        assert "no point reads within 10 ms; the fastest measured is 18.81" in (
            capsys.readouterr().err
        )
    assert main(["plan", "--target-tokens-per-s", "1e6", "--per-server-tokens-per-s", "55e3"]) == 0
    assert capsys.readouterr().out.startswith("19 servers for")
    assert main(["plan", "--target-tokens-per-s", "5e4", "--per-server-tokens-per-s", "55e3"]) == 0
    assert capsys.readouterr().out.startswith("1 server for")


def test_the_busiest_server_of_a_fleet_carries_its_part(tmp_path):
    fleet = Record("benchmarks.remote_kv_cache.test_trace", "", machine=MACHINE)
    for replay, servers, load in (
        ("store", 1, 1.0), ("store", 11, 1.5), ("store", 21, 2.5), ("wire", 21, 2.0),
    ):  # fmt: skip
        name = f"{replay}: {servers} servers, room for everything, nothing"
        fleet.figures.append(Figure(name, "%", {"read, most to mean": load}))
    fleet.write(tmp_path / "fleet.json")
    even = read_evenness(tmp_path / "fleet.json")
    assert [even.of(servers) for servers in (1, 6, 11, 16, 21, 100)] == [1, 1.25, 1.5, 1.75, 2, 2]
    Record("benchmarks.x", "", machine=MACHINE).write(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="no replay of a fleet"):
        read_evenness(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("plan --recorded --target-tokens-per-s 9 --client /nowhere", "/nowhere: not a record"),
        ("plan --source", "--target-tokens-per-s"),
        ("plan --source --target-tokens-per-s nan", "nan is not a number above 0"),
        ("plan --source --csv x --target-tokens-per-s 1", "not allowed with"),
        ("plan --per-server-tokens-per-s 9 --read-p50-ms 9 --target-tokens-per-s 9", "read_p50_ms"),
        ("plan --csv /nowhere --target-tokens-per-s 1", "/nowhere: not the CSV of a sweep"),
        ("plan --source --target-tokens-per-s 1 --fleet /nowhere", "/nowhere: not a record"),
        ("plan --record /nowhere --target-tokens-per-s 1", "/nowhere: not a record of a benchmark"),
        ("--concurrency 1,many", "'many' is neither a number nor like 8x2"),
        ("--storage-channels 4", "no storage is emulated without --storage-latency-ms"),
        ("--storage-latency-ms 9 --storage-spread-percent 101", "101 is not from 0 to 100"),
        ("--block-bytes 0", "block_bytes: a block has at least one byte"),
        ("--server tcp://a:1 --server tcp://a:1", "has the name 'a' too"),
        ("--server tcp://127.0.0.1:1 --server tcp://127.0.0.1:2", "name="),
        ("--server tcp://a:1 --servers 2", "servers: are started here; with --server none is"),
        ("--server tcp://a:1 --storage-latency-ms 20", "the delay is emulated in a server that"),
    ],
)
def test_what_is_asked_wrongly_is_said_before_anything_is_measured(asked, said, capsys):
    try:
        status = main(asked.split())
    except SystemExit as left:
        status = left.code
    assert status == 2
    assert said in capsys.readouterr().err


def test_a_storage_serves_as_many_blocks_at_once_as_it_has_channels():
    channels = Channels(latency_s=1.0, num_channels=2, spread=0.0)
    assert channels.done_at(1, now=10.0) == 11.0
    assert channels.done_at(1, now=10.0) == 11.0
    assert channels.done_at(3, now=10.5) == 13.0  # two behind the first two, one behind those
    assert channels.done_at(2, now=20.0) == 21.0


def test_a_storage_takes_its_latency_on_average_and_spreads_evenly_around_it():
    channels = Channels(latency_s=1.0, num_channels=1, spread=0.2)
    taken = [channels.done_at(1, now=10.0 * number) - 10.0 * number for number in range(2000)]
    assert 0.8 <= min(taken) < 0.81 and 1.19 < max(taken) <= 1.2
    assert sum(taken) / len(taken) == pytest.approx(1.0, rel=0.01)
    assert sum(one < 0.9 for one in taken) == pytest.approx(500, rel=0.15)


def test_gets_wait_for_the_storage_and_everything_else_overtakes_them():
    now, handled = [0.0], []
    gets = SlowGets(
        lambda client, frames, arrived: handled.append(frames), Channels(0.25, 4, 0.0),
        lambda: now[0],
    )  # fmt: skip

    def message(request: protocol.Request) -> list[memoryview]:
        return [memoryview(frame) for frame in protocol.encode(request)]

    read = message(protocol.Get(request_id=1, namespace="n", keys=[b"k"]))
    lookup = message(protocol.Lookup(request_id=2, namespace="n", keys=[b"k"]))
    nothing = message(protocol.Get(request_id=3, namespace="n", keys=[]))
    garbage = [memoryview(b"KVF1"), memoryview(b"\xff")]
    for frames in (read, lookup, nothing, garbage):
        gets.handle(b"client", frames)
    assert handled == [lookup, nothing, garbage]
    assert gets.pass_due() == 250
    now[0] = 0.125
    assert gets.pass_due() == 125
    assert read not in handled
    now[0] = 0.25
    assert gets.pass_due() == 0, "the answer has to be sent"
    assert handled[-1] == read
    assert gets.pass_due() is None
    times = gets.timing(lambda request: RequestTimes(0.0, lambda: now[0]))(None)
    assert times.now() == (250_000, 250_000), "the emulated time is the storage's"


def test_a_sweep_over_two_running_servers_is_without_errors_and_its_page_needs_nothing_else(
    tmp_path: Path,
):
    files = {name: tmp_path / f"sweep.{name}" for name in ("csv", "json", "html")}
    outputs = [word for name, file in files.items() for word in (f"--{name}", str(file))]
    small = ["--concurrency", "1x2", "--rounds", "1", "--seconds", "0.2", "--block-bytes", "4099"]
    config = ServerConfig(bind="tcp://127.0.0.1:*", memory=16 * MiB, populate=False, name="one")
    with Server(config) as one, Server(structs.replace(config, name="other")) as other:
        for server in (one, other):
            small += ["--server", f"{server.endpoint}?name={server.config.name}"]
        assert main([*small, *outputs]) == 0
        stores = [server.store for server in (one, other)]
        assert sum(store.counters["put_created"] for store in stores) > 0
        assert not any(store.namespaces.known for store in stores), "nothing of it is kept"
    (result,) = read_csv(files["csv"])
    assert (str(result.point), result.errors) == ("1x2", 0)
    assert result.tokens_per_s == pytest.approx(result.tps * 1152, rel=1e-3)
    assert result.lookup.p50 and result.read.p50 and result.write.p50
    assert result.split is not None
    assert sum(result.split.parts.values()) == pytest.approx(result.split.read, rel=0.05)
    assert result.raw_gb_per_s and result.server_percent is None
    record = json.loads(files["json"].read_text())
    assert record["command"] == f"python -m benchmarks.store_sweep run {shlex.join(small)}"
    assert record["parameters"]["servers"] == "2 servers on this machine, running already"
    assert "of the" in record["parameters"]["network"]
    assert [figure["name"] for figure in record["figures"]] == ["2 at once (1x2)"]
    _check_page(files["html"].read_text(), num_points=1, with_split=True)


def test_with_20_ms_of_storage_a_read_takes_them_and_they_are_the_storages(tmp_path: Path, capsys):
    csv = tmp_path / "sweep.csv"
    arguments = [
        "--concurrency", "1x2", "--seconds", "0.3", "--rounds", "1", "--block-bytes", "4KiB",
        "--servers", "2", "--storage-latency-ms", "20", "--storage-spread-percent", "0",
    ]  # fmt: skip
    assert main([*arguments, "--csv", str(csv)]) == 0
    (result,) = read_csv(csv)
    assert result.errors == 0
    assert result.read.p50 >= 20
    assert result.split is not None and result.split.storage >= 19.9, (
        "not the server's, nor the wire"
    )
    printed_text = capsys.readouterr().out
    assert "EMULATED" in printed_text and "2 servers on this machine" in printed_text


def _check_page(text: str, num_points: int, *, with_split: bool = False) -> None:
    parsed = Parsed(text)
    assert parsed.loads == ["script"] and parsed.unclosed == []
    assert not re.findall(r"https?://|//[a-z]|@import|src=", text), "an address outside"
    assert text.count("<svg ") == 3 + with_split
    assert text.count("<table>") == 5 + 2 * with_split
    assert len(parsed.ids) == len(set(parsed.ids)), "two charts share a name"
    tables = 4 if with_split else 2
    assert len(re.findall(r"<tr><td>", text)) == tables * num_points + len(source.results())
    assert "prefers-color-scheme: dark" in text
    assert "currentColor" in text and "#010203" not in text
    assert not re.findall(r"fill: ?#000000|stroke: ?#000000", text), "black letters in the dark"


@pytest.fixture(scope="module")
def sample_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("sweep") / "page.html"
    record = Record.begin("benchmarks.store_sweep", ["--concurrency", "<&>"])
    record.parameters["emulated storage"] = "20 ms <b>"
    file.write_text(rendered(record, source.results()))
    return file


def rendered(record: Record, results: list[Result], cores: int = 80) -> str:
    slas = within_slas(results, slas_for(results))
    return page.render(record, spare.verdicts(results, cores), slas, 4096)


def test_what_is_emulated_is_said_and_escaped(sample_page: Path):
    text = sample_page.read_text()
    assert "The storage is emulated:</strong> 20 ms &lt;b&gt;" in text
    assert "&lt;&amp;&gt;" in text
    _check_page(text, num_points=len(source.results()))


async def test_a_browser_shows_the_page_by_day_and_by_night(sample_page: Path):
    """Letters and ground swap; no request leaves the page; nothing is wider than a phone."""
    colours = """[getComputedStyle(document.body).backgroundColor,
                  getComputedStyle(document.querySelector('svg text')).fill]"""
    async with Browser(chromium_or_skip()) as opened:
        await opened.open(sample_page.as_uri())
        await opened.show(1000, 900)
        by_day = await opened.value(colours)
        await opened.show(390, 800, dark=True)
        by_night = await opened.value(colours)
        assert by_day[0] == "rgb(255, 255, 255)" and by_night[0] == "rgb(22, 24, 28)"
        assert by_day[1] == "rgb(26, 26, 26)" and by_night[1] == "rgb(232, 232, 232)"
        assert await opened.value("performance.getEntriesByType('resource').length") == 0
        assert await opened.value("document.documentElement.scrollWidth <= 390")
        await opened.value("document.querySelector('.keys button').click()")
        off = "document.querySelectorAll('.point.off').length"
        assert await opened.value(off) == len(source.results())
        await opened.value("document.querySelector('.point[tabindex=\"0\"]').focus()")
        tip = "document.querySelector('.tip').textContent"
        assert "ms at 1 at once" in await opened.value(tip)
        await opened.value(
            "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', "
            "{key: 'ArrowRight', bubbles: true}))"
        )
        assert "ms at 2 at once" in await opened.value(tip)
        assert await opened.value(
            "document.querySelector('.tip').getBoundingClientRect().right <= innerWidth"
        )
        assert not opened.problems
