"""`kvferry` with a list of servers: each command, and servers that do not answer."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest
from fake_server import eventually
from fleet_scene import NAMESPACE, ROW_BYTES, Prompt, Scene, all_ready, put
from server_process import PATIENCE_S

from remote_server.cli.__main__ import main
from remote_server.client import ClientConfig, RemoteClient
from remote_server.fleet.placement import homes
from remote_server.keys import make_keys

pytestmark = pytest.mark.real_time

pytest_plugins = ["fleet_fixtures"]

PROMPTS = [Prompt(seed, 8192) for seed in range(8)]
PROMPT = PROMPTS[0]
NUM_ROWS = sum(len(prompt.keys) for prompt in PROMPTS)
NAMES = [f"kvferry-{number}" for number in range(4)]


class Ended(NamedTuple):
    status: int
    out: str
    err: str


Kvferry = Callable[..., Ended]


@pytest.fixture
def filled(four: Scene) -> Scene:
    """Four servers that have the rows of some prompts between them, each row once."""
    fleet = four.fleet()
    eventually(lambda: all_ready(fleet), "all servers are ready")
    assert sum(put(fleet, prompt).created for prompt in PROMPTS) == NUM_ROWS
    fleet.close()
    assert all(held(four, name) for name in NAMES)
    return four


@pytest.fixture
def kvferry(filled: Scene, capsys: pytest.CaptureFixture[str]) -> Kvferry:
    """Run a command on all four servers, whose addresses are as they were at the start."""
    addresses = ",".join(filled.address(name) for name in NAMES)

    def run(*arguments: str, server: str = addresses) -> Ended:
        status = main([*arguments, "--server", server, "--timeout-s", "60"])
        return Ended(status, *capsys.readouterr())

    return run


def held(scene: Scene, name: str) -> int:
    return scene.servers[name].store.memory.num_blocks(NAMESPACE)


# ── stats, watch ─────────────────────────────────────────────────────────────────────────


def test_stats_have_a_line_for_each_server_and_sums_in_80_columns(filled: Scene, kvferry: Kvferry):
    status, out, err = kvferry("stats")
    lines = out.splitlines()
    for name, line in zip(NAMES, lines[1:5], strict=True):
        assert line.split()[:2] == [name, "yes"] and f" {held(filled, name)} " in line
    assert re.match(rf"all +4 of 4 +{NUM_ROWS} +1.0 MiB", lines[5])
    assert max(map(len, lines)) <= 80
    assert (status, err) == (0, "")


def test_a_server_that_is_down_is_named_and_the_others_are_shown(filled: Scene, kvferry: Kvferry):
    endpoint, lost = filled.servers["kvferry-2"].endpoint, held(filled, "kvferry-2")
    filled.stop("kvferry-2")
    status, out, err = kvferry("stats")
    assert status == 1
    assert re.search(r"^kvferry-2  no$", out, re.MULTILINE)
    assert re.search(rf"^all +3 of 4 +{NUM_ROWS - lost} ", out, re.MULTILINE)
    assert err == f"kvferry stats: kvferry-2: no connection to {endpoint}\n"
    facts = json.loads(kvferry("stats", "--json").out)
    assert [*facts["servers"]] == ["kvferry-0", "kvferry-1", "kvferry-3"]
    assert [*facts["failed"]] == ["kvferry-2"]
    assert facts["sum"]["namespaces"][NAMESPACE]["tiers"]["memory"]["blocks"] == NUM_ROWS - lost
    puts = [one["counters"]["put_created"] for one in facts["servers"].values()]
    assert facts["sum"]["counters"]["put_created"] == sum(puts) > 0


def test_top_shows_how_many_of_a_list_answer_and_which_does_not(filled: Scene, kvferry: Kvferry):
    filled.stop("kvferry-2")
    status, out, _ = kvferry("top", "--every-s", "0.01")
    head, note = out.splitlines()[:2]
    assert status == 1 and head.startswith("3 of 4 servers, up") and "kvferry-2" in note


def test_a_server_with_another_name_is_not_used(filled: Scene, kvferry: Kvferry):
    wrong = f"{filled.address('kvferry-0')},{filled.servers['kvferry-1'].endpoint}?name=other"
    status, out, err = kvferry("clear", "--all", "--yes", server=wrong)
    assert status == 1 and "kvferry-0  removed blocks" in out
    assert "has the name 'kvferry-1', and the client's list calls it 'other'" in err
    assert held(filled, "kvferry-1") > 0


def test_a_server_with_keys_has_its_own_in_the_list(filled: Scene, kvferry: Kvferry, tmp_path):
    keys = tmp_path / "keys"
    make_keys(keys, ["a"])
    filled.start("locked", keys=str(keys / "server.key"), tenants=str(keys / "tenants.toml"))
    both = f"{filled.address('kvferry-0')},{filled.address('locked')}"
    assert kvferry("stats", server=f"{both}&keys={keys}/client-a.key").status == 0
    status, out, _ = kvferry("stats", server=both)
    assert (status, "1 of 2" in out) == (1, True)


def test_no_server_at_all_is_status_3(filled: Scene, kvferry: Kvferry):
    for name in NAMES:
        filled.stop(name)
    for command in ("stats", "watch", "why", "clear --all --yes", f"pin {NAMESPACE}"):
        status, _, err = kvferry(*command.split())
        assert status == 3 and "none of the 4 servers answered" in err and "kvferry-3: no" in err


# ── lists ────────────────────────────────────────────────────────────────────────────────


def test_ranges_files_commas_and_repeated_flags_are_lists(
    filled: Scene, kvferry: Kvferry, capsys: pytest.CaptureFixture[str]
):
    assert "2 of 2" in kvferry("stats", server=filled.write_list(NAMES[:2])).out
    addresses = [filled.address(name) for name in NAMES]
    given = [part for address in addresses[:3] for part in ("--server", address)]
    assert main(["stats", *given]) == 0
    assert "3 of 3" in capsys.readouterr().out
    assert "4 of 4" in kvferry("stats", server=", ".join(addresses)).out
    one = kvferry("stats", "--json", server=filled.write_list(NAMES[:1]))
    assert json.loads(one.out)["name"] == "kvferry-0", "a list of one is one server"


def test_a_wrong_list_is_status_2_before_any_server_is_asked(
    filled: Scene, kvferry: Kvferry, capsys: pytest.CaptureFixture[str]
):
    address = filled.address("kvferry-0")
    with pytest.raises(SystemExit) as ended:
        kvferry("clear", "--all", "--yes", server=f"{address},{address}")
    assert ended.value.code == 2 and "kvferry-0" in capsys.readouterr().err
    assert main(["clear", "--all", "--yes", "--server", address, "--server", address]) == 2
    assert "kvferry-0" in capsys.readouterr().err
    assert held(filled, "kvferry-0") > 0
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--server", filled.write_list(NAMES)])
    assert ended.value.code == 2, "it measures one server"
    err = capsys.readouterr().err
    assert "a list of 4 servers" in err and filled.servers["kvferry-0"].endpoint in err


# ── clear, pin, why ──────────────────────────────────────────────────────────────────────


def test_clear_names_what_it_did_not_reach_and_a_second_one_leaves_nothing(
    filled: Scene, kvferry: Kvferry
):
    counts = {name: held(filled, name) for name in NAMES}
    status, _, err = kvferry("clear", "--namespace", "nothing", "--yes")
    assert (status, err) == (1, f"kvferry clear: no namespace 'nothing'; known: {NAMESPACE}\n")
    assert {name: held(filled, name) for name in NAMES} == counts
    addresses = ",".join(filled.address(name) for name in NAMES[:3])
    filled.stop("kvferry-2")
    assert kvferry("clear", "--all", server=addresses).status == 1
    assert held(filled, "kvferry-0") == counts["kvferry-0"], "no --yes, and no terminal"
    status, out, err = kvferry("clear", "--namespace", NAMESPACE, "--yes", server=addresses)
    assert status == 1
    assert f"kvferry-0  removed blocks: {counts['kvferry-0']} from memory" in out
    assert "not cleared: kvferry-2. Their blocks may be found again" in err
    assert held(filled, "kvferry-0") == held(filled, "kvferry-1") == 0 < counts["kvferry-1"]
    assert kvferry("clear", "--all", "--yes", server=filled.address("kvferry-3")).status == 0
    assert held(filled, "kvferry-3") == 0


def test_pin_goes_to_the_servers_that_have_the_blocks_and_counts_are_sums(
    filled: Scene, kvferry: Kvferry
):
    named = [PROMPT.keys[0].hex(), PROMPT.keys[-1].hex(), "aabb"]
    status, out, err = kvferry("pin", NAMESPACE, *named)
    assert (status, out.splitlines()[0]) == (0, "pinned 2 blocks, 8.0 KiB")
    assert err == "kvferry pin: 1 keys are not in memory\n"
    assert sum(filled.servers[name].store.memory.stats().kept for name in NAMES) == 2
    assert json.loads(kvferry("pin", NAMESPACE, "--json").out)["kept"] == NUM_ROWS
    done = json.loads(kvferry("unpin", NAMESPACE, "--json").out)
    assert (done["let_go"], done["absent"], len(done["servers"])) == (NUM_ROWS, 0, 4)
    assert kvferry("pin", "other") == (1, "", "kvferry pin: no block of 'other' is in memory\n")
    filled.stop("kvferry-1")
    status, out, err = kvferry("pin", NAMESPACE)
    assert status == 1 and out.startswith("pinned ")
    assert "not asked: kvferry-1; repeat this when they answer" in err


def test_why_shows_who_has_a_block_and_the_homes_where_its_key_begins_a_run(
    filled: Scene, kvferry: Kvferry
):
    first, second = (NAMES[number] for number in homes(NAMES, NAMESPACE, PROMPT.keys[0]))
    status, out, _ = kvferry("why", PROMPT.keys[0].hex())
    assert status == 0
    assert f"the first block of run 0; homes: {first}, then {second}" in out
    holders = [name for name in NAMES if 0 in filled.holds(name, PROMPT)]
    assert re.findall(r"(\S+) +\d+ % full  memory", out) == holders and holders[0] in (
        first,
        second,
    )
    inside = kvferry("why", PROMPT.keys[1].hex()).out
    assert "in run 0: the key of that run's first block decides the homes" in inside
    (fact,) = json.loads(kvferry("why", PROMPT.keys[0].hex(), "--json").out)["blocks"]
    assert fact["homes"] == [first, second] and [*fact["copies"]] == holders
    assert kvferry("why", "aabb").status == 1


def test_why_names_the_difference_of_engines_that_declared_to_different_servers(
    filled: Scene, kvferry: Kvferry
):
    clients = []
    for name, dtype in (("kvferry-0", "bfloat16"), ("kvferry-1", "half")):
        config = ClientConfig(filled.servers[name].endpoint, client_name=f"engine of {name}")
        clients.append(client := RemoteClient(config))
        client.declare(f"m@{dtype}", ROW_BYTES, {"model": "m", "dtype": dtype})
        eventually(lambda ready=client: ready.ready, "the engine is ready")
    row = memoryview(bytes(ROW_BYTES))
    assert clients[0].put("m@bfloat16", [b"k" * 16], [row]).result(PATIENCE_S).created == 1
    status, out, _ = kvferry("why", "m@")
    assert status == 1
    assert (
        "engine of kvferry-1 cannot use the blocks of m@bfloat16 (1 blocks): dtype is half" in out
    )
    for client in clients:
        client.close()


# ── processes ────────────────────────────────────────────────────────────────────────────


def test_watching_goes_on_without_a_server_that_is_gone_and_ends_with_ctrl_c(filled: Scene):
    command = [sys.executable, "-m", "remote_server.cli", "watch", "--json"]
    addresses = ",".join(map(filled.address, NAMES))
    process = subprocess.Popen(
        [*command, "--server", addresses, "--timeout-s", str(PATIENCE_S)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        # A shell has its background jobs ignore the signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert "kvferry" in process.stdout.readline()
        filled.stop("kvferry-1")
        assert any("the server is gone" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
    finally:
        process.kill()
        process.communicate()


def test_a_server_that_stands_still_costs_a_command_its_time_and_no_other_server(
    filled: Scene, capsys: pytest.CaptureFixture[str]
):
    count = held(filled, "kvferry-2")
    with filled.frozen("kvferry-1"):
        given = ("--server", ",".join(map(filled.address, NAMES)), "--timeout-s", "0.5")
        assert main(["clear", "--all", "--yes", *given]) == 1
    assert "not cleared: kvferry-1." in capsys.readouterr().err
    assert held(filled, "kvferry-2") == 0 < count
