"""A list of servers has one name and one address for each, or an error shows the wrong part."""

import logging
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from remote_server.errors import ConfigError
from remote_server.fleet.server_list import MOST_MEMBERS, Member, ServerList, WatchedList, read_list


def names_of(servers: ServerList) -> list[str]:
    return [member.name for member in servers.members]


def write(path: Path, *lines: str) -> str:
    """`lines` as the file at `path`, replaced in one step; the setting for it."""
    fresh = path.with_suffix(".new")
    fresh.write_text("\n".join(lines))
    os.replace(fresh, path)
    return f"file://{path}"


@pytest.mark.parametrize("text", ["tcp://10.0.0.7:5757", "tcp://localhost:1", "tcp://cache.svc:1"])
def test_one_plain_address_is_a_list_of_one_without_a_name(text: str):
    assert read_list(text) == read_list([text]) == ServerList((Member("", text),))
    assert WatchedList(text).changed() is None
    assert read_list(f"{text}?name=a&keys=/k&copies=head") == (
        (Member("a", text, "/k"),), True
    )  # fmt: skip


def test_a_range_has_a_member_for_each_number_named_by_the_first_label():
    servers = read_list("tcp://kvferry-{0..9}.kvferry:5757?keys=/etc/client.key")
    assert names_of(servers) == [f"kvferry-{number}" for number in range(10)]
    assert servers.members[3] == Member(
        "kvferry-3", "tcp://kvferry-3.kvferry:5757", "/etc/client.key"
    )
    assert not servers.copies_head
    assert read_list(["tcp://a:1", "tcp://b:1?copies=head"]).copies_head, "one decides for all"


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("tcp://c{08..11}:1", ["c08", "c09", "c10", "c11"]),
        ("tcp://c{9..11}:1", ["c10", "c11", "c9"]),
        ("tcp://c{7..7}.x:1", ["c7"]),
        (["tcp://z:1", "tcp://10.0.0.1:1?name=m", "tcp://a:1"], ["a", "m", "z"]),
    ],
)
def test_members_stand_in_the_order_of_their_names_and_ranges_keep_their_zeros(setting, names):
    assert names_of(read_list(setting)) == names


def test_ranges_of_one_address_are_counted_together():
    servers = read_list("tcp://127.0.0.1:{5757..5759}?name=s{0..2}&keys=/k{1..3}")
    assert servers.members == (
        Member("s0", "tcp://127.0.0.1:5757", "/k1"),
        Member("s1", "tcp://127.0.0.1:5758", "/k2"),
        Member("s2", "tcp://127.0.0.1:5759", "/k3"),
    )


def test_the_digest_depends_on_the_names_alone():
    digest = read_list(["tcp://a:1", "tcp://b:1"]).digest
    assert len(digest) == 16 and int(digest, 16)
    assert read_list(["tcp://b:9?keys=/k", "tcp://[::1]:1?name=a&copies=head"]).digest == digest
    assert read_list(["tcp://a:1", "tcp://c:1"]).digest != digest
    assert read_list(["tcp://a:1", "tcp://b:1", "tcp://c:1"]).digest != digest


WRONG: list[tuple[str | Sequence[str], str, str]] = [
    (["tcp://a:1", "tcp://10.0.0.1:2"], "'tcp://10.0.0.1:2': 10.0.0.1 gives no name",
     "tcp://10.0.0.1:2?name=cache-1"),
    (["tcp://a:1", "tcp://localhost:2"], "'tcp://localhost:2': localhost gives no name", "?name="),
    (["tcp://a:1", "tcp://[::1]:2"], "'tcp://[::1]:2': [::1] gives no name", "?name=cache-1"),
    (["tcp://a.x:1", "tcp://a.y:2"], "'tcp://a.y:2': tcp://a.x:1 has the name 'a' too",
     "tcp://a.y:2?name=another"),
    (["tcp://a:1", "tcp://A:1?name=b"], "it is in the list already, as 'a'", "{0..9}"),
    (["tcp://a:1", "tcp://b"], "'tcp://b': the port is missing", "tcp://127.0.0.1:5757"),
    ("tcp://a{0..x}:1", "'{0..x}' is no range of numbers", "{0..9}"),
    ("tcp://a{3..2}:1", "'{3..2}' ends before it begins", "{0..9}"),
    ("tcp://a{0..1024}:1", "'{0..1024}' has more than 1,024 numbers", "{0..9}"),
    ("tcp://a{0..2}:{1..2}", "its ranges have 3 and 2 numbers", "name=cache-{1..3}"),
    (["tcp://a{0..999}:1", "tcp://b{0..99}:1"], "more than 1,024 servers", "{0..9}"),
    ([], "no server in the list", "{0..9}"),
    ("file://servers", "'file://servers': the path is not absolute", "file:///etc/kvferry/servers"),
    ("file:///s?keys=/k", "a '?' belongs behind a server in the file", "file:///etc"),
    (["tcp://a:1", "file:///s"], "'file:///s': file:// is not tcp://", "tcp://127.0.0.1"),
    ("tcp://a:" + "9" * 5_000, "is not a number from 1 to 65535", "tcp://127.0.0.1"),
    ("tcp://a" + "{1..2}" * 1_000 + ":1", "it has more than 16 ranges", "{0..9}"),
]  # fmt: skip


@pytest.mark.parametrize(("setting", "wrong", "example"), WRONG)
def test_a_wrong_list_is_one_sentence(setting: str | Sequence[str], wrong: str, example: str):
    with pytest.raises(ConfigError) as refused:
        read_list(setting, "server")
    text = str(refused.value)
    assert text.startswith("server: ") and "\n" not in text
    assert wrong in text and example in text.partition(" like ")[2]
    with pytest.raises(ConfigError) as refused:
        read_list(setting, "")
    assert not str(refused.value).startswith("server: ")


def test_a_file_has_a_server_a_line_and_comments(tmp_path: Path):
    setting = write(
        tmp_path / "servers", "# ours", "", "tcp://b:1 # by the door", "tcp://a{1..2}:1\r"
    )
    assert names_of(read_list(setting)) == ["a1", "a2", "b"]
    assert names_of(read_list(write(tmp_path / "one", "tcp://c.x:1"))) == ["c"]


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        (["tcp://a:1", "", "tcp://b"], "servers, line 3: 'tcp://b': the port is missing"),
        (["# none"], "servers: no server in the list; write one like tcp://"),
        (["tcp://a:1", "tcp://a.x:2"], "servers, line 2: 'tcp://a.x:2': tcp://a:1 has the name"),
    ],
)
def test_a_wrong_file_names_its_line(lines: list[str], wrong: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"^server: ") as refused:
        read_list(write(tmp_path / "servers", *lines))
    assert wrong in str(refused.value)


def test_a_file_that_is_no_text_or_not_there_is_an_error(tmp_path: Path):
    path = tmp_path / "servers"
    with pytest.raises(ConfigError, match="No such file"):
        WatchedList(f"file://{path}")
    path.write_bytes(b"tcp://a:1\n\xff")
    with pytest.raises(ConfigError, match="byte 10 is not UTF-8"):
        WatchedList(f"file://{path}")


def test_a_watched_file_is_read_again_when_it_changed(tmp_path: Path):
    watched = WatchedList(write(tmp_path / "servers", "tcp://a:1", "tcp://b:1"))
    assert watched.changed() is None
    write(tmp_path / "servers", "tcp://a:1 # moved to rack 2", "tcp://b:1")
    assert watched.changed() is None, "another comment"
    write(tmp_path / "servers", "tcp://a:1", "tcp://c:1")
    found = watched.changed()
    assert found is not None and names_of(found) == ["a", "c"]
    assert watched.current == found and watched.changed() is None


def test_a_configmap_that_swaps_its_symlink_is_a_change(tmp_path: Path):
    for version, server in (("v1", "tcp://a:1"), ("v2", "tcp://b:1")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "servers").write_text(server)
        os.utime(tmp_path / version / "servers", (1, 1))
    (tmp_path / "..data").symlink_to("v1")
    (tmp_path / "servers").symlink_to("..data/servers")
    watched = WatchedList(f"file://{tmp_path}/servers")
    (tmp_path / "fresh").symlink_to("v2")
    os.replace(tmp_path / "fresh", tmp_path / "..data")
    found = watched.changed()
    assert found is not None and names_of(found) == ["b"]


def test_a_bad_file_keeps_the_list_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING)
    path = tmp_path / "servers"
    watched = WatchedList(write(path, "tcp://a:1"))
    before = watched.current
    write(path, "tcp://a")
    assert [watched.changed() for _ in range(3)] == [None] * 3
    path.unlink()
    assert [watched.changed() for _ in range(3)] == [None] * 3
    wrong, missing = caplog.messages
    assert "line 1: 'tcp://a': the port is missing" in wrong and "the list before is kept" in wrong
    assert f"cannot read {path}: No such file" in missing and watched.current == before
    write(path, "tcp://a:1")
    assert watched.changed() is None and watched.current == before
    path.unlink()
    watched.changed()
    assert len(caplog.messages) == 3  # it was right meanwhile


def test_no_secret_of_a_line_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    watched = WatchedList(write(tmp_path / "servers", "tcp://a:1"))
    write(tmp_path / "servers", "tcp://a:1?keys=/very/private&copies=no")
    watched.changed()
    assert len(caplog.messages) == 1 and "/very/private" not in caplog.text


def test_no_text_is_worse_than_an_error():
    """Random settings are lists with unique names and addresses, or a `ConfigError`."""
    chance = random.Random(11)
    pieces = ["tcp://", "a", "b", ".x", ":", "{0..2}", "{", "}", "10.0.0.", "[::1]", "é", "\0", " "]
    ends = [":1", ":{1..3}", "", ":1?name=b", ":1?keys=k&name=c{1..3}", ":1?copies=head", ":1?&"]
    rights = 0
    for _ in range(1500):
        texts = [
            "tcp://"
            + "".join(chance.choices(pieces, k=chance.randrange(1, 4)))
            + chance.choice(ends)
            for _ in range(chance.randrange(1, 3))
        ]
        try:
            servers = read_list(texts)
        except ConfigError:
            continue
        rights += 1
        assert 1 <= len(servers.members) <= MOST_MEMBERS
        assert len({one.name for one in servers.members}) == len(servers.members)
        assert len({one.endpoint for one in servers.members}) == len(servers.members)
    assert rights > 10
