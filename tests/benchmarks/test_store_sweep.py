"""The sweep: what a conversation asks for, what a slow storage does to it, what is concluded."""

import importlib.util
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from benchmarks.harness.record import Record
from benchmarks.store_sweep import conversation, page, source, sweep
from benchmarks.store_sweep.__main__ import main
from benchmarks.store_sweep.operating import best_within, operating_points, servers_for
from benchmarks.store_sweep.points import Percentiles, Point, as_csv, read_csv
from benchmarks.store_sweep.slow_server import Channels, SlowGets
from remote_server import protocol
from remote_server.errors import ConfigError

# ── a conversation ───────────────────────────────────────────────────────────────────────────


def test_a_conversation_is_7_lookups_6_reads_and_3_writes_booked_as_1152_tokens():
    assert (conversation.LOOKUPS, conversation.READS, conversation.WRITES) == (7, 6, 3)
    assert conversation.TOKENS_BOOKED == 1152
    assert [turn.known for turn in conversation.TURNS] == [0, 1, 1, 1, 2, 2, 3]
    assert [turn.full - turn.known for turn in conversation.TURNS] == [1, 0, 0, 1, 0, 1, 0]
    assert conversation.BLOCKS_MOVED == 13


def test_a_key_depends_on_all_that_came_before_it():
    keys = [
        key
        for speaker, number in ((b"a", 0), (b"a", 1), (b"b", 0))
        for key in conversation.keys_of(speaker, number)
    ]
    assert len(set(keys)) == len(keys) == 3 * conversation.BLOCKS
    assert {len(key) for key in keys} == {36}
    assert keys[:3] == conversation.keys_of(b"a", 0)


# ── points ───────────────────────────────────────────────────────────────────────────────────


def test_up_to_eight_clients_are_processes_and_beyond_that_processes_have_more():
    parsed = [
        Point.parse(text) for text in ["1", "2", "4", "6", "8", "16", "32", "64", "80", "3x5"]
    ]
    assert [str(point) for point in parsed] == [
        "1x1", "2x1", "4x1", "6x1", "8x1", "8x2", "8x4", "8x8", "8x10", "3x5"
    ]  # fmt: skip
    for wrong in ("9", "0", "x2", "2x0", "-1", "two"):
        with pytest.raises(ConfigError, match="concurrency"):
            Point.parse(wrong)


def talk(*lookups: float, conversations: int = 1, seconds: float = 1.0) -> dict:
    return {
        "lookups": list(lookups), "reads": [1.0], "writes": [1.0],
        "conversations": conversations, "seconds": seconds, "errors": [],
    }  # fmt: skip


def test_percentiles_are_of_all_samples_and_not_means_of_each_clients():
    fast, slow = talk(*[1.0] * 99), talk(*[100.0] * 99)
    result = sweep.pooled(Point(2, 1), [fast, slow], None)
    assert (result.lookup.p50, result.lookup.p90) == (1.0, 100.0)  # a mean of both: 50.5
    outlier = sweep.pooled(Point(2, 1), [talk(*[1.0] * 500), talk(*[1.0] * 499, 9.0)], None)
    assert (outlier.lookup.p99, outlier.lookup.p100) == (1.0, 9.0)


def test_rates_add_up_and_a_conversation_is_1152_tokens():
    talks = [talk(conversations=10, seconds=2.0), talk(conversations=6, seconds=1.5)]
    result = sweep.pooled(Point(1, 2), talks, None)
    assert result.tps == 9.0
    assert result.tokens_per_s == 9 * 1152


def test_csv_comes_back_as_it_was_and_begins_with_the_sources_columns(tmp_path: Path):
    results = [
        replace(result, write=Percentiles(1.5, 2.5, 3.5, 4.5), errors=2, cpu_percent=55.5)
        for result in source.results()
    ]
    file = tmp_path / "sweep.csv"
    file.write_text(as_csv([*results, *source.results()]))
    assert read_csv(file) == [*results, *source.results()]
    assert file.read_text().startswith(
        "processes,concurrency_per_process,total_concurrency,tps,tokens_per_sec,"
        "lookup_p50_ms,lookup_p90_ms,lookup_p99_ms,lookup_p100_ms,"
        "read_p50_ms,read_p90_ms,read_p99_ms,read_p100_ms,"
    )
    file.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="not the CSV of a sweep"):
        read_csv(file)


# ── conclusions ──────────────────────────────────────────────────────────────────────────────


def test_the_rules_choose_from_the_sources_table_what_its_authors_chose():
    chosen = {
        one.profile: one.result.point.concurrency for one in operating_points(source.results())
    }
    assert chosen == {"low latency": 8, "balanced": 32, "high throughput": 64, "maximum": 80}


def test_a_point_with_errors_is_never_recommended():
    results = [replace(result, errors=1) for result in source.results()]
    assert operating_points(results) == []
    with pytest.raises(ConfigError, match="no point reads within"):
        best_within(results, 1000)


def test_a_million_tokens_at_55_000_a_server_are_19_servers(tmp_path, capsys):
    assert servers_for(1_000_000, 55_000) == 19
    assert servers_for(110_000, 55_000) == 2
    file = tmp_path / "sweep.csv"
    file.write_text(as_csv(source.results()))
    for how in (["--csv", str(file)], ["--source"]):
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
    assert capsys.readouterr().out.startswith("19 servers")
    assert main(["plan", "--target-tokens-per-s", "1e6"]) == 2


# ── the emulated storage ─────────────────────────────────────────────────────────────────────


def test_a_storage_serves_as_many_blocks_at_once_as_it_has_channels():
    channels = Channels(latency_s=1.0, num_channels=2)
    assert channels.done_at(1, now=10.0) == 11.0
    assert channels.done_at(1, now=10.0) == 11.0
    assert channels.done_at(3, now=10.5) == 13.0  # two behind the first two, one behind those
    assert channels.done_at(2, now=20.0) == 21.0


def test_gets_wait_for_the_storage_and_everything_else_overtakes_them():
    now, handled = [0.0], []
    gets = SlowGets(
        lambda client, frames: handled.append(frames), Channels(0.25, 4), lambda: now[0]
    )

    def message(request: protocol.Request) -> list[memoryview]:
        return [memoryview(frame) for frame in protocol.encode(request)]

    read = message(protocol.Get(request_id=1, namespace="n", keys=[b"k"]))
    lookup = message(protocol.Lookup(request_id=2, namespace="n", keys=[b"k"]))
    nothing = message(protocol.Get(request_id=3, namespace="n", keys=[]))
    garbage = [memoryview(b"KVF1"), memoryview(b"\xff")]
    for frames in (read, lookup, nothing, garbage):
        gets.handle(b"client", frames)
    assert handled == [lookup, nothing, garbage]
    assert gets.go_on() == 250
    now[0] = 0.125
    assert gets.go_on() == 125
    assert read not in handled
    now[0] = 0.25
    assert gets.go_on() == 0, "the answer has to be sent"
    assert handled[-1] == read
    assert gets.go_on() is None


# ── for real ─────────────────────────────────────────────────────────────────────────────────


def test_a_sweep_over_a_real_server_is_without_errors_and_its_page_needs_nothing_else(
    tmp_path: Path,
):
    files = {name: tmp_path / f"sweep.{name}" for name in ("csv", "json", "html")}
    outputs = [word for name, file in files.items() for word in (f"--{name}", str(file))]
    small = ["--concurrency", "1,2x2", "--seconds", "0.2", "--block-bytes", "4099"]
    assert main([*small, *outputs]) == 0
    results = read_csv(files["csv"])
    assert [str(result.point) for result in results] == ["1x1", "2x2"]
    for result in results:
        assert result.errors == 0
        assert result.tokens_per_s == pytest.approx(result.tps * 1152, rel=1e-3)
        assert result.lookup.p50 and result.read.p50 and result.write.p50
    record = json.loads(files["json"].read_text())
    assert record["command"] == " ".join(["python -m benchmarks.store_sweep run", *small])
    assert [figure["name"] for figure in record["figures"]] == [
        "1 at once (1x1)",
        "4 at once (2x2)",
    ]
    _check_page(files["html"].read_text(), num_points=2)


def test_with_20_ms_of_storage_a_read_takes_them_and_a_lookup_does_not(tmp_path: Path, capsys):
    csv, slow = tmp_path / "sweep.csv", ["--storage-latency-ms", "20", "--storage-channels", "1"]
    arguments = ["--concurrency", "2", "--seconds", "0.3", "--block-bytes", "4KiB", *slow]
    assert main([*arguments, "--csv", str(csv)]) == 0
    (result,) = read_csv(csv)
    assert result.errors == 0
    assert result.read.p50 >= 20
    assert result.lookup.p50 < 20
    assert "EMULATED" in capsys.readouterr().out


class _Page(HTMLParser):
    """Counts what a page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]


def _check_page(text: str, num_points: int) -> None:
    parsed = _Page(text)
    assert not re.findall(r"https?://|//[a-z]|@import|src=", text), "an address outside"
    assert parsed.tags.count("svg") == 3
    assert parsed.tags.count("table") == 3
    assert "script" not in parsed.tags
    assert len(parsed.ids) == len(set(parsed.ids)), "two charts share a name"
    assert len(re.findall(r"<tr><td>", text)) == num_points + len(source.results())
    assert "prefers-color-scheme: dark" in text
    assert "currentColor" in text and "#010203" not in text
    assert not re.findall(r"fill: ?#000000|stroke: ?#000000", text), "black letters in the dark"


@pytest.fixture
def sample_page(tmp_path: Path) -> Path:
    file = tmp_path / "page.html"
    record = Record.begin("benchmarks.store_sweep", ["--concurrency", "<&>"])
    file.write_text(page.render(record, source.results(), 4096, "20 ms <b>"))
    return file


def test_what_is_emulated_is_said_and_escaped(sample_page: Path):
    text = sample_page.read_text()
    assert "The storage is emulated:</strong> 20 ms &lt;b&gt;" in text
    assert "&lt;&amp;&gt;" in text
    _check_page(text, num_points=len(source.results()))


async def test_a_browser_shows_the_page_by_day_and_by_night(sample_page: Path):
    """Letters and ground swap; no request leaves the page; nothing is wider than a phone."""
    driver = Path(__file__).parent.parent / "remote_server" / "browser.py"
    if not driver.exists():
        pytest.skip("no driver of a browser here")
    spec = importlib.util.spec_from_file_location("browser", driver)
    assert spec is not None and spec.loader is not None
    browser = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(browser)
    if (chromium := browser.find_chromium()) is None:
        pytest.skip("no Chromium on the PATH, and KVFERRY_CHROMIUM names none")
    colours = """[getComputedStyle(document.body).backgroundColor,
                  getComputedStyle(document.querySelector('svg text')).fill]"""
    async with browser.Browser(chromium) as opened:
        await opened.open(sample_page.as_uri())
        await opened.show(1000, 900)
        by_day = await opened.value(colours)
        await opened.show(390, 800, dark=True)
        by_night = await opened.value(colours)
        assert by_day[0] == "rgb(255, 255, 255)" and by_night[0] == "rgb(22, 24, 28)"
        assert by_day[1] == "rgb(26, 26, 26)" and by_night[1] == "rgb(232, 232, 232)"
        assert await opened.value("performance.getEntriesByType('resource').length") == 0
        assert await opened.value("document.documentElement.scrollWidth <= 390")
        assert not opened.problems
