"""`kvferry serve --all` with real processes, and the conflicts that it finds before any starts."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from fleet_processes import COMMAND, All, fleet_file, is_running, serve_all
from server_process import PATIENCE_S
from wire_peer import Peer

from remote_server.cli.__main__ import main
from remote_server.cli.serving import supervisor
from remote_server.cli.serving.serve_all import conflicts, list_for_engines
from remote_server.cli.serving.supervisor import Supervisor
from remote_server.errors import ConfigError
from remote_server.fleet.server_list import read_list
from remote_server.server.config import ServerConfig

pytestmark = pytest.mark.real_time

FLEET = Path(__file__).parents[4] / "examples" / "fleet" / "fleet.toml"


def wait_until_gone(*pids: int) -> None:
    ends = time.monotonic() + PATIENCE_S
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < ends, f"{pids} have not ended"
        time.sleep(0.01)


# ── processes ────────────────────────────────────────────────────────────────────────────


def test_every_server_answers_under_the_address_of_the_printed_list_and_drains_once(
    tmp_path, context
):
    """Ctrl-C reaches the whole foreground group; a server in it would get two and not drain."""
    path = fleet_file(tmp_path, "a", "longer-name")
    with serve_all(path) as fleet:
        fleet.until_ready(2)
        (line,) = [line for line in fleet.lines if "for engines" in line]
        engines = json.loads("{" + line.partition("for engines: ")[2] + "}")["server"]
        members = read_list(engines).members
        assert [one.name for one in members] == ["a", "longer-name"]
        for member in members:
            Peer(context, member.endpoint).hello()
        assert len({*fleet.pids.values(), fleet.popen.pid}) == 3
        assert fleet.popen.pid not in {os.getpgid(pid) for pid in fleet.pids.values()}
        os.killpg(fleet.popen.pid, signal.SIGINT)
        assert fleet.ended() == 0
        lines = fleet.rest()
        assert {line.index(" | ") for line in lines} == {len("longer-name")}
        assert sum(": draining for up to 5s" in line for line in lines) == 2
        assert sum("ended with status 0" in line for line in lines) == 2
        wait_until_gone(*fleet.pids.values())


def test_a_server_that_dies_is_named_the_others_go_on_and_outlive_no_supervisor(tmp_path, context):
    path = fleet_file(tmp_path, "a", "b")
    with serve_all(path) as fleet:
        fleet.until_ready(2)
        os.kill(fleet.pids["a"], signal.SIGKILL)
        assert fleet.line("a ended").endswith("a ended with SIGKILL; the others go on")
        other = re.findall(r'"(tcp:[^"?]+)\?name=b"', "\n".join(fleet.lines))[0]
        Peer(context, other).hello()
        fleet.popen.kill()
        wait_until_gone(*fleet.pids.values())


def test_a_reader_that_leaves_ends_the_servers(tmp_path):
    """As `kvferry serve --all | head` does."""
    with subprocess.Popen(
        [*COMMAND, "--settings", str(fleet_file(tmp_path, "a")), "--all"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as all_of_them:  # fmt: skip
        assert all_of_them.stdout is not None and all_of_them.stderr is not None
        all_of_them.stdout.readline()
        all_of_them.stdout.close()
        assert all_of_them.wait(PATIENCE_S) == 1
        assert all_of_them.stderr.read() == ""


@pytest.mark.parametrize("second", [None, "deaf", "draining"])
def test_a_server_that_does_not_end_is_killed_after_the_drain_or_the_second_signal(
    monkeypatch, second
):
    """With the time that it has cut short. The second signal comes with the program's answer to the
    first, or while that is passed on to a program that does not answer."""
    monkeypatch.setattr(supervisor, "BESIDE_DRAIN_S", 600.0 if second else 0.05)
    monkeypatch.setattr(supervisor, "AT_ONCE_S", 0.05)
    # It takes signals in turn: a handler does not run for one that comes just before a pause.
    answers = "True" if second == "deaf" else "False"
    code = (
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {15})\n"
        "print('deaf', flush=True)\n"
        f"while signal.sigwait({{15}}):\n if {answers}: print('deaf', flush=True)"
    )
    lines: list[str] = []

    def write(text: str) -> None:
        lines.append(text)
        awaited = second if any("draining" in line for line in lines) else "deaf"
        if awaited is not None and awaited in text:
            signal.raise_signal(signal.SIGTERM)

    command = [sys.executable, "-c", code]
    assert Supervisor({"one": command}, 0.0, write).run(lambda pids: None) == 1
    assert lines[-2:] == ["kvferry | one has not ended in time and is killed\n",
                          "kvferry | one ended with SIGKILL\n"]  # fmt: skip
    assert ("kvferry | ending one at once\n" in lines) is (second is not None)


def test_output_comes_in_lines_also_when_it_is_long_unended_or_hostile():
    lines: list[str] = []
    code = "import sys; sys.stdout.buffer.write(b'x' * 200_000 + b'\\n\\x1b[31m\\xff\\nlast')"
    command = [sys.executable, "-c", code]
    assert Supervisor({"one": command}, 0.0, lines.append).run(lambda pids: None) == 0
    texts = [line.removeprefix("one     | ").removesuffix("\n") for line in lines]
    assert "".join(texts[:-3]) == "x" * 200_000 and len(texts) > 4
    assert texts[-3:-1] == ["\\x1b[31m\ufffd", "last"]


# ── before anything starts ───────────────────────────────────────────────────────────────


def test_the_example_starts_four_servers(monkeypatch):
    started: dict[str, Sequence[str]] = {}

    class Started:
        def __init__(self, commands: Mapping[str, Sequence[str]], drain_s: float) -> None:
            started.update(commands)

        def run(self, _: object) -> int:
            return 0

    monkeypatch.setattr("remote_server.cli.serving.serve_all.Supervisor", Started)
    monkeypatch.setattr(
        "remote_server.cli.serving.serve_all.check_memory_fits", lambda *_, **__: None
    )
    assert main(["serve", "--all", "--settings", str(FLEET)]) == 0
    assert [*started] == [f"cache-{number}" for number in range(4)]
    assert started["cache-1"][-3:] == [f"--settings={FLEET}", "--name", "cache-1"]


def configs(**settings: dict) -> dict[str, ServerConfig]:
    ports = iter(range(6000, 7000))
    given = {
        name: {"bind": f"tcp://127.0.0.1:{next(ports)}", "admin": "off", **own}
        for name, own in settings.items()
    }
    return {name: ServerConfig(**own) for name, own in given.items()}


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ({"bind": "tcp://127.0.0.1:5000"}, {"bind": "tcp://localhost:5000"}, "port 5000: bind"),
        ({"bind": "tcp://0.0.0.0:5000", "insecure": True}, {"bind": "tcp://127.0.0.1:5000"},
         "port 5000"),
        ({"admin": "http://127.0.0.1:5758"}, {"admin": "http://127.0.0.1:5758"},
         "port 5758: admin"),
        ({"admin": "http://127.0.0.1:5000"}, {"bind": "tcp://127.0.0.1:5000"},
         "admin = http://127.0.0.1:5000 and bind = tcp://127.0.0.1:5000"),
        ({"disk": "/d/one"}, {"disk": "/d/x/../one"}, "both have disk = /d/one"),
        ({"disk": "/d/one"}, {"disk": "/d/one/two"}, "one is inside the other"),
        ({}, {"bind": "tcp://127.0.0.1:*"}, "b: bind: .* no fixed port"),
    ],
)  # fmt: skip
def test_two_servers_that_cannot_run_side_by_side_are_named(one, other, found):
    (sentence,) = conflicts(configs(a=one, b=other))
    assert re.search(found, sentence)
    assert "b" in sentence and "\n" not in sentence


def test_servers_that_share_nothing_or_only_a_bucket_do_not_conflict():
    apart = {"bind": "tcp://127.0.0.1:5000", "disk": "/d/one", "bucket": "s3://bucket"}
    beside = {"bind": "tcp://127.0.0.2:5000", "disk": "/d/one-more", "bucket": "s3://bucket"}
    assert conflicts(configs(a=apart, b=beside)) == []
    assert conflicts(configs(a={"admin": "http://127.0.0.1:*"}, b={})) == []


def test_the_list_names_keys_and_a_host_that_engines_can_reach():
    keys = {"keys": "server.key", "tenants": "tenants.toml"}
    found = list_for_engines(configs(a={"bind": "tcp://10.0.0.7:5000", **keys}))
    assert found == ["tcp://10.0.0.7:5000?keys=/path/client.key&name=a"]
    (found,) = list_for_engines(configs(a={"bind": "tcp://*:5000", "insecure": True}))
    assert found == f"tcp://{os.uname().nodename}:5000?name=a"


def test_a_name_that_no_list_can_have_is_refused():
    with pytest.raises(ConfigError, match="the list for engines"):
        list_for_engines(configs(**{"a&b": {}, "c": {}}))


@pytest.mark.parametrize(
    ("flags", "text", "complaint"),
    [
        (["--all"], None, "--all: it needs --settings FILE"),
        (["--all", "--name", "a"], "[servers.a]", "--name a: --all starts every server"),
        (["--all"], 'memory = "1GiB"', "has no [servers.NAME]"),
        (["--all"], '[servers.a]\nmemory = "1GiB"\n[servers.a]', "is not TOML"),
        (["--all"], '[servers.a]\nmemroy = "1GiB"', "[servers.a]: settings: "),
        (["--all"], "[servers.a]\n[servers.b]", "a and b both listen on port 5757"),
        (["--all"], "[servers.a]\n[servers.b]", "a and b both listen on port 5758"),
        (["--all"], '[servers.a]\nmemory = "900TiB"', "memory of all servers"),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_starts(
    tmp_path, capsys, monkeypatch, flags, text, complaint
):
    monkeypatch.delenv("KVFERRY_ADMIN", raising=False)
    monkeypatch.setattr(All, "__init__", None)
    monkeypatch.setattr("remote_server.cli.serving.supervisor.Child.__init__", None)
    if text is not None:
        (tmp_path / "fleet.toml").write_text(text)
        flags = [*flags, "--settings", str(tmp_path / "fleet.toml")]
    assert main(["serve", *flags]) == 2
    printed = capsys.readouterr()
    (line,) = [line for line in printed.err.splitlines() if complaint in line]
    assert line.startswith("kvferry serve: ") and printed.out == ""


def test_an_unknown_flag_beside_all_is_named(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--all", "--memroy", "1GiB"])
    assert ended.value.code == 2
    assert "did you mean --memory?" in capsys.readouterr().err


def test_the_settings_of_all_are_printed_and_give_the_same_fleet_again(tmp_path, capsys):
    path = fleet_file(tmp_path, "a", "b", b='disk = "/d/b"')
    arguments = ["--all", "--print-config", "--settings"]
    assert main(["serve", *arguments, str(path)]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "again.toml").write_text(printed)
    assert main(["serve", *arguments, str(tmp_path / "again.toml")]) == 0
    again = capsys.readouterr().out
    assert [line.partition("#")[0] for line in again.splitlines()] == [
        line.partition("#")[0] for line in printed.splitlines()
    ]
    assert 'disk = "/d/b"' in printed
