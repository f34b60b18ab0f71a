"""`kvferry` as an operator meets it: what it prints, and the exit status that scripts trust."""

import json
from pathlib import Path

import pytest
from client_helpers import key

from remote_server.cli.__main__ import main
from remote_server.cli.checks import doctor as doctor_module
from remote_server.cli.figures.stats_lines import events
from remote_server.client import ClientConfig, RemoteClient
from remote_server.client.lanes import link as lane_link
from remote_server.protocol import StatsReply
from remote_server.store import namespaces

pytestmark = pytest.mark.real_time

FACTS = {"model": "m", "dtype": "bfloat16", "hash_algo": "sha256", "hash_seed": "0"}
REPOSITORY = Path(__file__).resolve().parents[3]
NOBODY = "tcp://127.0.0.1:1"


@pytest.fixture
def engine(server):
    """An engine of the server, by name, namespace, and what it declares; with `blocks` stored."""
    clients = []

    def make(name, namespace, blocks=0, **facts):
        # Over one connection, so that blocks lie in slabs in the order of their keys.
        client = RemoteClient(ClientConfig(server.endpoint, client_name=name, quiet=True, lanes=0))
        clients.append(client)
        client.declare(namespace, 4096, FACTS | facts)
        while not client.ready:
            pass
        keys, rows = [key(i) for i in range(blocks)], [memoryview(bytes(4096))] * blocks
        assert client.put(namespace, keys, rows, deferred=False).result(60).created == blocks
        return client

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def kvferry(server, capsys):
    """Run a command on the server: the status, what it printed, what it complained of."""

    def run(*arguments):
        status = main([*arguments, "--server", server.endpoint, "--timeout-s", "60"])
        out, err = capsys.readouterr()
        return status, out, err

    return run


# ── why ──────────────────────────────────────────────────────────────────────────────────


def test_why_names_the_dtype_in_which_two_engines_differ_and_no_folder_of_a_model(kvferry, engine):
    engine("first", "m@1", blocks=3, model_name="/models/one")
    engine("second", "m@2", dtype="half", model_name="/models/two")
    status, out, _ = kvferry("why")
    assert status == 1
    assert "second cannot use the blocks of m@1 (3 blocks): dtype is half here and bfloat16" in out
    assert "first, of /models/one" in out and "second, of /models/two" in out
    (gap,) = json.loads(kvferry("why", "--json")[1])
    assert gap["fields"] == {"dtype": ["half", "bfloat16"]}
    assert (gap["here"], gap["other"], gap["blocks"]) == ("second", "m@1", 3)


def test_why_shows_of_which_engines_the_server_knows_no_more(kvferry, engine, monkeypatch):
    engine("first", "m@1", blocks=3)
    monkeypatch.setattr(namespaces, "MAX_TEXT_BYTES", 4_000)
    engine("second", "m@2", dtype="half", one="x" * 1_000, other="x" * 1_000)
    status, out, _ = kvferry("why")
    assert "no longer known" in next(line for line in out.splitlines() if "m@1" in line)
    assert (status, "nearly equal" in out) == (0, True)


def test_why_says_so_where_no_engine_has_been(kvferry, engine):
    status, out, _ = kvferry("why")
    assert (status, "no engine has declared" in out) == (1, True)
    engine("first", "m@1")
    status, out, _ = kvferry("why", "other")
    assert (status, "'other'" in out) == (1, True)


# ── doctor ───────────────────────────────────────────────────────────────────────────────


def test_doctor_finds_the_server_its_transport_and_the_engines_that_differ(
    kvferry, engine, server, monkeypatch
):
    monkeypatch.setattr(lane_link, "why_slow", str)  # lanes also without the C library
    engine("first", "m@1", blocks=3)
    engine("second", "m@2", dtype="half")
    status, out, _ = kvferry("doctor", "--json")
    assert status == 1
    found = {finding["check"]: finding for finding in json.loads(out)}
    assert found["engines"]["verdict"] == "bad" and "dtype is" in found["engines"]["told"]
    assert "shared memory: this host" in found["transport"]["told"]
    assert found["lanes from here"]["verdict"] == "ok"
    assert "0.0 s from ours" in found["clocks"]["told"]
    assert sorted(server.store.namespaces.known) == ["m@1", "m@2"], "doctor left something behind"


def test_doctor_without_a_server_still_looks_at_the_host(capsys):
    assert main(["doctor", "--server", NOBODY]) == 3
    out = capsys.readouterr().out
    assert "clock source" in out and f"no connection to {NOBODY}" in out


def test_doctor_warns_of_little_shared_memory(tmp_path, monkeypatch):
    usage = type("Usage", (), {"total": 64 << 20, "free": 64 << 20, "used": 0})
    monkeypatch.setattr(doctor_module.shutil, "disk_usage", lambda _: usage)  # type: ignore[attr-defined]
    found = {finding.check: finding for finding in doctor_module.host_findings(sys_=tmp_path)}
    assert found["shared memory"].verdict == "bad" and "--shm-size" in found["shared memory"].told
    assert found["huge pages"].verdict == "note"


@pytest.mark.parametrize(
    ("setting", "verdict", "told"),
    [("always within_size [advise] never", "ok", "advise"),
     ("always within_size advise [never]", "note", "never; a server's memory")],
)  # fmt: skip
def test_doctor_shows_how_shared_memory_gets_huge_pages(tmp_path, setting, verdict, told):
    file = tmp_path / "kernel/mm/transparent_hugepage/shmem_enabled"
    file.parent.mkdir(parents=True)
    file.write_text(setting + "\n")
    found = {finding.check: finding for finding in doctor_module.host_findings(sys_=tmp_path)}
    assert found["huge pages"].verdict == verdict and told in found["huge pages"].told
    assert (f"`echo advise > {file}`" in found["huge pages"].told) == (verdict == "note")


@pytest.mark.parametrize(
    ("version", "verdict", "told"),
    [("0.32.5", "ok", "0.32.5: tested"), ("0.30.0", "bad", "cannot run on vLLM 0.30.0: install"),
     ("", "ok", "none in this Python")],
)  # fmt: skip
def test_doctor_judges_the_vllm_of_this_python(tmp_path, monkeypatch, version, verdict, told):
    if version:
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / "__init__.py").touch()
        (tmp_path / "vllm" / "_version.py").write_text(f"__version__ = {version!r}")
    else:
        no_packages = "import sys; sys.path[:] = [each for each in sys.path if 'site-' not in each]"
        (tmp_path / "sitecustomize.py").write_text(no_packages)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPOSITORY}")
    found = {finding.check: finding for finding in doctor_module.host_findings()}
    assert found["vLLM"].verdict == verdict and told in found["vLLM"].told


# ── stats, watch, clear ──────────────────────────────────────────────────────────────────


def test_stats_print_occupancy_by_tier_and_namespace(kvferry, engine):
    engine("first", "m@1", blocks=3)
    status, out, _ = kvferry("stats")
    assert status == 0
    rows = [line.split() for line in out.splitlines()]
    assert ["memory", "12.0", "KiB", "16.0", "MiB", "3", "0", "0"] in rows
    assert ["m@1", "4.0", "KiB", "3", "12.0", "KiB"] in rows
    assert json.loads(kvferry("stats", "--json")[1])["namespaces"]["m@1"]["tiers"] == {
        "memory": {"blocks": 3, "used_bytes": 3 * 4096}
    }


def _reply(epoch="e", **counters):
    return StatsReply(
        request_id=1, protocol=2, epoch=epoch, server="s", uptime_s=10.0, time_s=0.0, tiers={},
        namespaces={}, counters=counters,
    )  # fmt: skip


def test_watch_tells_what_grew_and_that_a_server_was_restarted():
    before, now = _reply(put_total=2, bytes_in=0), _reply(put_total=5, bytes_in=2 << 20)
    assert events(before, now) == (
        ["put_total 3", "bytes_in 2.0 MiB"], {"put_total": 3, "bytes_in": 2 << 20}
    )  # fmt: skip
    assert events(now, now) == ([], {})
    assert "restarted" in events(now, _reply("other"))[0][0]


def test_clear_removes_what_it_says_and_only_when_told_to(kvferry, engine, server):
    engine("first", "m@1", blocks=3)
    engine("second", "m@2", blocks=2)
    nothing = "kvferry clear: nothing removed; --yes skips the question\n"
    assert kvferry("clear", "--all")[::2] == (1, nothing)
    assert kvferry("clear", "--namespace", "m", "--yes")[2].endswith("known: m@1, m@2\n")
    status, out, _ = kvferry("clear", "--namespace", "m@1", "--yes")
    assert (status, out) == (0, "removed blocks: 3 from memory\n")
    assert server.store.memory.num_blocks("m@2") == 2


# ── pin, unpin ───────────────────────────────────────────────────────────────────────────


def test_pin_keeps_what_is_named_and_unpin_lets_it_go(kvferry, engine, server):
    engine("first", "m@1", blocks=3)
    named = [key(1).hex(), key(2).hex(), key(2).hex(), key(7).hex()]
    status, out, err = kvferry("pin", "m@1", *named)
    assert (status, out) == (0, "pinned 2 blocks, 8.0 KiB\n")
    assert "1 keys are not in memory" in err
    assert "2 (2 kept)" in kvferry("stats")[1]
    assert json.loads(kvferry("pin", "m@1", "--json")[1]) == {
        "kept": 3, "bytes": 3 * 4096, "declined": 0, "absent": 0
    }  # fmt: skip
    assert kvferry("unpin", "m@1", key(1).hex())[:2] == (0, "unpinned 1 blocks, 4.0 KiB\n")
    assert kvferry("unpin", "m@1")[:2] == (0, "unpinned 2 blocks, 8.0 KiB\n")
    assert server.store.memory.stats().pinned == 0


def test_pin_says_no_when_nothing_is_there_or_not_all_may_be_kept(kvferry, engine):
    assert kvferry("pin", "m@9") == (1, "", "kvferry pin: no block of 'm@9' is in memory\n")
    engine("first", "m@1", blocks=4096 // 2 + 10)
    status, out, _ = kvferry("unpin", "m@1", key(1).hex(), "--json")
    assert (status, json.loads(out)["absent"]) == (1, 1)
    assert kvferry("unpin", "m@1", "ab")[2] == "kvferry unpin: none of the 1 keys is pinned\n"
    status, out, err = kvferry("pin", "m@1")
    assert (status, out) == (1, "pinned 2,048 blocks, 8.0 MiB\n")
    assert "10 blocks declined: no more than half of the memory's slabs" in err


# ── all of them ──────────────────────────────────────────────────────────────────────────


def test_no_server_is_status_3_and_says_where_it_looked(capsys):
    for command in ("stats", "why", "watch", "clear --all --yes", "pin m", "unpin m"):
        assert main([*command.split(), "--server", NOBODY]) == 3
        assert NOBODY in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    ["", "stat", "stats --wach", "clear", "pin", "pin m xy", "unpin m " + "00" * 129],
    ids=lambda command: command[:12],
)
def test_wrong_usage_is_status_2(command, capsys):
    try:
        status = main(command.split())
    except SystemExit as ended:
        status = ended.code
    assert status == 2


def test_clear_forgets_every_namespace_of_all(kvferry, engine, server):
    engine("first", "m@1", blocks=3)
    engine("second", "m@2", blocks=2).close()
    status, out, _ = kvferry("clear", "--all", "--forget", "--yes")
    assert (status, "removed blocks: 5 from memory" in out) == (0, True)
    assert "m@2" not in server.store.namespaces.known


def test_why_of_an_unknown_namespace_is_no_also_in_json(kvferry, engine):
    engine("first", "m@1")
    assert kvferry("why", "zz")[0] == kvferry("why", "zz", "--json")[0] == 1
