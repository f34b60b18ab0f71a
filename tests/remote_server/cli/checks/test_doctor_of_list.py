"""`kvferry doctor` with a list: names, engines whose list differs, servers that do not answer."""

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_server import eventually
from fleet_scene import Scene

from remote_server.cli.__main__ import main
from remote_server.cli.checks.doctor_fleet import Asked, lists_of_engines, name_of
from remote_server.fleet.server_list import Member, read_list
from remote_server.protocol import StatsReply

pytestmark = pytest.mark.real_time

pytest_plugins = ["fleet_fixtures"]

LIST = read_list(["tcp://a:1", "tcp://b:1"])
A, B = LIST.members


def reply(name: str, **fleets: list[str]) -> StatsReply:
    return StatsReply(
        request_id=1, epoch="e", server="s", uptime_s=1.0, tiers={}, namespaces={}, counters={},
        name=name, fleets=fleets,
    )  # fmt: skip


def test_the_name_of_a_server_is_compared_with_the_list_and_one_without_a_list_with_none():
    for name, verdict, text in (
        ("a", "ok", "a, as in the list"),
        ("b", "bad", "tcp://a:1 is b, which the list has at tcp://b:1; the list calls it a"),
        ("c", "bad", "has the name c, which the list does not have: correct the list, or start"),
        ("", "note", "of a version without names"),
    ):
        ((found, why),) = name_of(LIST, A, reply(name))
        assert found == verdict and text in why
    assert [*name_of(read_list("tcp://a:1"), Member("", "tcp://a:1"), reply("x"))] == []


def test_engines_with_another_list_are_named_once_with_where_they_were_seen():
    other = "f" * 16
    asked = [
        Asked(A, reply("a", **{other: ["engine-2"], LIST.digest: ["engine-1"]})),
        Asked(B, reply("b", **{other: ["engine-2"]})),
    ]
    ((verdict, why),) = lists_of_engines(LIST, asked)
    assert verdict == "bad" and "engine-2 has another list of servers, digest ffff" in why
    assert "Seen at a, b." in why and LIST.digest in why


def test_engines_with_this_list_are_good_and_no_engine_is_nothing():
    same = Asked(A, reply("a", **{LIST.digest: ["engine-1"]}))
    assert [verdict for verdict, _ in lists_of_engines(LIST, [same])] == ["ok"]
    assert [*lists_of_engines(LIST, [Asked(A, reply("a")), Asked(B, None, "lost")])] == []


# ── the command ──────────────────────────────────────────────────────────────────────────


def list_of(path: Path, **endpoints: str) -> str:
    path.write_text("\n".join(f"{one}?name={name}" for name, one in endpoints.items()))
    return f"file://{path}"


Doctor = Callable[[str], tuple[int, dict[str, tuple[str, str]]]]


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Doctor:
    def doctor(servers: str) -> tuple[int, dict[str, tuple[str, str]]]:
        status = main(["doctor", "--server", servers, "--timeout-s", "60", "--json"])
        found = json.loads(capsys.readouterr().out)
        return status, {one["check"]: (one["verdict"], one["told"]) for one in found}

    return doctor


def bad_ones(found: dict[str, tuple[str, str]]) -> set[str]:
    """Of servers and lists: what this host lacks is not of interest here."""
    return {
        check for check, (verdict, _) in found.items()
        if verdict == "bad" and (": " in check or check == "lists")
    }  # fmt: skip


def test_a_server_that_does_not_answer_and_one_of_another_name_are_bad(
    scene: Scene, doctor: Doctor, tmp_path: Path
):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        lost = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
        c, d = scene.start("c").endpoint, scene.start("d").endpoint
        status, found = doctor(list_of(tmp_path / "list", a=lost, b=c, d=d))
    assert status == 1 and bad_ones(found) == {"a: server", "b: name"}
    assert found["d: name"] == ("ok", "d, as in the list") and found["d: server"][0] == "ok"
    assert lost in found["a: server"][1] and "has the name c" in found["b: name"][1]


def test_an_engine_with_another_list_is_bad(scene: Scene, doctor: Doctor, tmp_path: Path):
    """Servers show the names of the clients that are connected, and their lists."""
    servers = [scene.start(name) for name in "ab"]
    here = list_of(tmp_path / "list", **{one.config.name: one.endpoint for one in servers})
    there = [scene.address("a"), "tcp://127.0.0.1:1?name=c"]
    one, other = (
        scene.fleet(of, client_name=name) for name, of in (("engine-1", here), ("engine-2", there))
    )
    eventually(lambda: one.num_ready == 2 and other.num_ready == 1, "connected")
    seen = servers[0].loop_calls.call(servers[0].snapshot).result(60)
    assert (seen.name, sorted(seen.fleets.values())) == ("a", [["engine-1"], ["engine-2"]])
    status, found = doctor(here)
    assert status == 1 and bad_ones(found) == {"lists"}
    assert "engine-2 has another list" in found["lists"][1] and "Seen at a." in found["lists"][1]


def test_a_wrong_list_is_wrong_usage(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--server", "tcp://10.0.0.{1..2}:5757"])
    assert "10.0.0.1 gives no name, and a server in a list needs one" in capsys.readouterr().err
