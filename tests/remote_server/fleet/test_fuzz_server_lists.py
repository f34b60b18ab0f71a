"""Lists of servers as engines, files and ConfigMaps give them: a list that clients can use, or one
sentence that names the setting."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_server.errors import ConfigError
from remote_server.fleet.server_list import MOST_MEMBERS, ServerList, WatchedList, read_list
from remote_server.values import check_endpoint

pytest_plugins = ["fuzzing"]

PIECES = (
    "tcp://", "file://", "file:///", "ipc://", "://", "a", "b", "c.x", "10.0.0.", "127.1", "[::1]",
    "[", "]", "{0..2}", "{00..11}", "{9..1}", "{0..1023}", "{0..1024}", "{0..999999999}", "{", "}",
    "..", ":", ":1", ":5757", ":65536", ":*", ":{1..3}", "/", "?", "?name=", "?keys=/k",
    "?copies=head", "&", "&name=n{0..2}", "=", "#", " ", ",", "*", "-", "\t", "\r", "\n", "\0",
    "\x1b[2J", "é", "１", "²", "\u2028", "9" * 5_000, "1" * 80, "x" * 300, "{1..2}" * 400, "%",
    "localhost",
)  # fmt: skip

hosts = st.sampled_from(["a", "b", "A", "a.x", "10.0.0.1", "[::1]", "c{0..2}", "c{1..3}.x", "n_1"])
ports = st.sampled_from(["1", "2", "65535", "{1..3}", "{5757..5759}", "0", "01"])
options = st.sampled_from(["", "?name=b", "?name=m{0..2}", "?keys=/k", "?copies=head&keys=/k"])
nearly = st.builds(lambda *parts: "tcp://{}:{}{}".format(*parts), hosts, ports, options)
wild = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=7).map("".join)
texts = nearly | wild | st.tuples(nearly, wild).map("".join)
lists = texts | st.lists(nearly | texts, max_size=5)
files = st.lists(st.binary(max_size=30) | texts.map(lambda text: text.encode(errors="replace")),
                 max_size=5).map(b"\n".join)  # fmt: skip


def judge(servers: ServerList) -> None:
    """Every member can be connected to, and found by its name."""
    members = servers.members
    assert 1 <= len(members) <= MOST_MEMBERS
    assert [*members] == sorted(members)
    assert len({one.name for one in members}) == len(members)
    assert len({one.endpoint.lower() for one in members}) == len(members)
    assert len(members) == 1 or all(one.name for one in members)
    for name, endpoint, keys in members[:16]:
        check_endpoint(endpoint, "")
        if name:
            again = f"{endpoint}?name={name}" + (f"&keys={keys}" if keys else "")
            assert read_list(again).members == ((name, endpoint, keys),)


def refusal(error: ConfigError) -> None:
    assert re.match("server: .", str(error))


def test_a_setting_is_a_list_of_servers_or_one_sentence(fuzz: Any) -> None:
    @given(lists)
    def read(setting: str | Sequence[str]) -> None:
        try:
            servers = read_list(setting)
        except ConfigError as error:
            refusal(error)
        else:
            judge(servers)
            assert WatchedList(setting).current == servers

    fuzz.run(read, examples=150)


def test_a_file_that_is_watched_has_a_new_list_or_changes_nothing(
    fuzz: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remote_server.fleet.server_list.log.warning", lambda *_: None)
    path, fresh = tmp_path / "servers", tmp_path / "fresh"
    path.write_text("tcp://a:1")
    watched = WatchedList(f"file://{path}")

    @given(files)
    def follow(data: bytes) -> None:
        fresh.write_bytes(data)
        os.replace(fresh, path)
        before = watched.current
        try:
            expected = read_list(f"file://{path}")
        except ConfigError as error:
            refusal(error)
            expected = before
        else:
            judge(expected)
        assert watched.changed() == (None if expected == before else expected)
        assert watched.current == expected and watched.changed() is None

    fuzz.run(follow, examples=100)
