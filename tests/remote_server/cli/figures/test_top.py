"""`kvferry top`: its lines from two replies, and the command on a server."""

import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake_server import eventually

from remote_server.cli.__main__ import main
from remote_server.cli.figures.stats_lines import contents
from remote_server.cli.figures.sums import sum_of
from remote_server.cli.figures.top_lines import WIDTH, screen
from remote_server.client import ClientConfig, RemoteClient
from remote_server.errors import ServerUnavailable
from remote_server.protocol import EngineReport, EngineState, StatsReply, TierStats

pytestmark = pytest.mark.real_time

MiB = 1 << 20


def engine(name: str, tokens: int, given_up: int = 0, **reused: int) -> EngineState:
    return EngineState(
        namespace="m@1", client=name, model="m", software="vLLM 0.33.0", prompt_tokens=tokens,
        reused=reused, given_up=given_up,
    )  # fmt: skip


def reply(
    uptime_s: float = 10.0, epoch: str = "e", engines: tuple[EngineState, ...] = (), **counters: int
) -> StatsReply:
    tier = TierStats(
        budget_bytes=200, used_bytes=50, blocks=1234, pending=0, pinned=0, free_slabs=0
    )
    return StatsReply(
        request_id=1, epoch=epoch, server="kvferry 0.2.0", name="cache-1", uptime_s=uptime_s,
        namespaces={}, counters=counters, tiers={"memory": tier, "disk": tier},
        engines=[*engines],
    )  # fmt: skip


def line_of(lines: list[str], start: str) -> list[str]:
    (line,) = [line for line in lines if line.startswith(start)]
    return line.removeprefix(start).split()


def test_it_shows_hit_rates_flows_tiers_and_engines_now_and_in_all():
    before = reply(10.0, lookup_keys=100, lookup_hits=10, hits_memory=8, hits_disk=2,
                   bytes_in=MiB, evicted=5, disk_evicted=0, put_declined_quota=1)  # fmt: skip
    now = reply(12.0, lookup_keys=200, lookup_hits=90, hits_memory=38, hits_disk=12,
                bytes_in=5 * MiB, evicted=25, disk_evicted=4, put_declined_quota=7,
                engines=(engine("vllm-a", 1000, 3, engine=500, pool=100, server=300),))  # fmt: skip
    lines = screen(now, before)
    assert line_of(lines, "lookups")[:4] == ["80.0", "%", "45.0", "%"]
    assert line_of(lines, "  from memory")[:4] == ["75.0", "%", "76.0", "%"]
    assert line_of(lines, "in  ") == ["2.0", "MiB/s", "5.0", "MiB"]
    for start, shown in (
        ("memory", "50 B 200 B 25.0 % 1,234 10 3"),
        ("disk", "50 B 200 B 25.0 % 1,234 2 0"),
        ("vllm-a", "1,000 50.0 % 10.0 % 30.0 % 10.0 % 3"),
    ):
        assert " ".join(line_of(lines, start)) == shown


def test_the_numbers_are_those_of_stats():
    now = reply(lookup_keys=200, lookup_hits=90, get_total=90, get_hit=81, bytes_out=3 * MiB)
    stats, top = "\n".join(contents(now)), "\n".join(screen(now, None))
    for figure in ("45.0 %", "90.0 %", "200 blocks", "3.0 MiB", "1,234"):
        assert figure in stats and figure in top


def test_a_restart_is_no_negative_rate():
    before = reply(1000.0, "old", lookup_keys=5000, lookup_hits=100, bytes_in=9 * MiB)
    lines = screen(reply(1.0, "new", lookup_keys=2, lookup_hits=1), before)
    assert "-" in line_of(lines, "lookups") and not re.search(r" -\d", "\n".join(lines))


def test_no_line_is_longer_than_80_columns_and_many_engines_are_counted():
    engines = tuple(
        engine("e" * 100 + str(number), 10**15 + number, 10**8, engine=10**14)
        for number in range(300)
    )
    big = dict.fromkeys(("lookup_keys", "lookup_hits", "bytes_in", "evicted"), 10**17)
    lines = screen(reply(10.0, engines=engines, **big), reply(9.0), most_engines=7)
    assert max(map(len, lines)) <= WIDTH and "and 293 more" in lines
    assert sum(line.startswith("eee") for line in lines) == 7


def test_an_engine_of_several_servers_is_one_line():
    a = reply(engines=(engine("one", 100), engine("two", 50)))
    b = reply(engines=(engine("one", 120),))
    assert {one.client: one.prompt_tokens for one in sum_of({"a": a, "b": b}).engines} == {
        "one": 120, "two": 50,
    }  # fmt: skip


# ── the command ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("flags", [["--once"], []], ids=["once", "without a terminal"])
def test_once_prints_one_screen_with_the_engine_that_reported(server, capsys, flags):
    client = RemoteClient(ClientConfig(server.endpoint, client_name="vllm-a", quiet=True))
    client.declare("m@1", 4096, {"model_name": "m"})
    client.report(EngineReport("vLLM 0.33.0", 1000, {"engine": 500, "server": 250}, 7))
    eventually(lambda: client.ready)
    eventually(lambda: client.stats().result(60).engines)
    typed = ["top", *flags, "--every-s", "0.01", "--server", server.endpoint]
    assert main([*typed, "--timeout-s", "60"]) == 0
    lines = capsys.readouterr().out.splitlines()
    client.close()
    shown = " ".join(line_of(lines, "vllm-a"))
    assert shown == "1,000 50.0 % 0.0 % 25.0 % 25.0 % 7"
    assert sum(line.startswith("found") for line in lines) == 1


def test_ctrl_c_gives_the_terminal_back(server):
    """On a terminal of its own: the other screen and the hidden cursor end with it."""
    code = (
        "import os, signal, sys, time, types\n"
        "from remote_server.cli.figures import top\n"
        "from remote_server.cli.__main__ import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in the background
        "def wait(_):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
        "top.time = types.SimpleNamespace(sleep=wait)\n"
        f"sys.exit(main(['top', '--server', {server.endpoint!r}, '--timeout-s', '60']))\n"
    )
    main_end, other_end = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=other_end,
                               cwd=Path(__file__).parents[4])  # fmt: skip
    assert process.wait(60) == 130
    with open(main_end, "rb", buffering=0) as terminal:
        printed = terminal.read(1 << 16).decode()
    assert printed.startswith("\x1b[?1049h\x1b[?25l")
    assert printed.endswith("\x1b[?25h\x1b[?1049l") and "lookups" in printed


def test_without_a_server_it_ends_with_status_3(capsys):
    assert main(["top", "--server", "127.0.0.1:1"]) == 3
    assert "no connection to tcp://127.0.0.1:1" in capsys.readouterr().err


def test_a_server_that_is_gone_between_two_looks_ends_it_with_status_3(server, capsys, monkeypatch):
    looks = iter([reply()])

    def ask(*_):
        for one in looks:
            return one
        raise ServerUnavailable("gone")

    monkeypatch.setattr("remote_server.cli.figures.top.ask_stats", ask)
    typed = ["top", "--once", "--every-s", "0.01", "--server", server.endpoint]
    assert main([*typed, "--timeout-s", "60"]) == 3
    assert "no answer any more" in capsys.readouterr().err
