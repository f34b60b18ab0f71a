"""Every way to get a setting wrong: one line that names it and status 2, and never a traceback."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from memory_server import memory_server
from typed_commands import parser_for
from wire_peer import Peer

from remote_server.cli.__main__ import main as kvferry
from remote_server.cli.commands import COMMANDS
from remote_server.errors import ConfigError
from remote_server.keys import make_keys
from remote_server.protocol import Error
from remote_server.server import settings
from remote_server.server.config import MIN_INFLIGHT_BYTES, ServerConfig

# A file without an end, or without a writer, would hang its reader.
pytestmark = [pytest.mark.real_time, pytest.mark.timeout(60)]

NUMERIC = [
    field for field in msgspec.structs.fields(ServerConfig)
    if isinstance(field.default, int | float) and not isinstance(field.default, bool)
]  # fmt: skip
ONE_OF_EACH_TYPE = {str(field.type): field.name for field in NUMERIC}.values()
TEXTS = ["nan", "NaN", "inf", "-inf", "", " ", "-5", "1e400", "0x10", "1_000", "１２", "٣", "1,5",
         "9" * 5_000, "1" * 400 + ".5GiB", "--", "1\n", "²", "true"]  # fmt: skip
LITERALS = ["nan", "inf", "-inf", "-5", "[1]", "{ a = 1 }", "1979-05-27", "true", '"１２"', '""',
            "9" * 40, '"1_0"']  # fmt: skip
QUIET = ("--memory", "16MiB", "--bind", "tcp://127.0.0.1:*", "--admin", "off")


@pytest.fixture
def refused(capsys):
    """Run the server's command: it must refuse, in one line that names the setting."""

    def refused(name: str, *flags: str) -> str:
        assert kvferry(["serve", *flags]) == 2, flags
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1, err
        assert err.startswith(f"kvferry serve: {name}: "), err
        return err

    return refused


@pytest.fixture(scope="module")
def not_chosen():
    """What the command does with its sources, without a parser anew for each."""
    parser = parser_for("serve")
    assert all(action.type is None for action in parser._actions), "a reading of its own"

    def not_chosen(name: str, *flags: str, **environment: str) -> None:
        with pytest.raises(ConfigError, match=rf"^{name}: "):
            settings.choose(parser.flags_in(flags), environment)

    return not_chosen


# ── numbers ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("field", NUMERIC, ids=lambda field: field.name)
def test_what_is_no_number_is_refused_from_every_source(field, not_chosen, tmp_path):
    file, flag = tmp_path / "s.toml", f"--{field.name.replace('_', '-')}"
    for text in TEXTS if field.name in ONE_OF_EACH_TYPE else TEXTS[:7]:
        not_chosen(field.name, f"{flag}={text}")
        not_chosen(field.name, **{f"KVFERRY_{field.name.upper()}": text})
    for literal in LITERALS if field.name in ONE_OF_EACH_TYPE else LITERALS[:5]:
        file.write_text(f"{field.name} = {literal}\n", encoding="utf-8")
        not_chosen(field.name, "--settings", str(file))
    if settings.bare_kind(field.type) is not float:
        file.write_text(f"{field.name} = 20000000.7\n")
        not_chosen(field.name, "--settings", str(file))
        not_chosen(field.name, f"{flag}=20000000.7")


def test_a_refusal_is_one_line_whatever_was_given(refused):
    for text in TEXTS:
        refused("memory", f"--memory={text}")


def test_a_negative_zero_is_zero(capsys):
    assert kvferry(["serve", "--print-config", "--ttl-s=-0", "--drain-timeout-s=-0.0"]) == 0
    assert "-0" not in capsys.readouterr().out


def test_every_setting_of_text_refuses_what_is_no_text(not_chosen, tmp_path):
    file = tmp_path / "s.toml"
    for field in msgspec.structs.fields(ServerConfig):
        if field.type is str:
            for literal in ("1.5", "['a']", "true", r'"a\u0000"'):
                file.write_text(f"{field.name} = {literal}\n")
                not_chosen(field.name, "--settings", str(file))
            not_chosen(field.name, f"--{field.name.replace('_', '-')}=\udcff")


def test_a_client_can_have_a_block_whatever_max_inflight_is(context, not_chosen):
    not_chosen("max_inflight", "--max-inflight", "1")
    with memory_server(max_inflight=MIN_INFLIGHT_BYTES) as server:
        peer = Peer(context, server.endpoint)
        answer = peer.hello(block_bytes=MIN_INFLIGHT_BYTES + 1)
        assert isinstance(answer, Error) and answer.code == "too_large"
        assert "--max-inflight" in answer.message
        peer.hello(block_bytes=MIN_INFLIGHT_BYTES)
        peer.put([1], length=MIN_INFLIGHT_BYTES)
        assert len(peer.get([1])[1]) == 1


# ── files ────────────────────────────────────────────────────────────────────────────────

DEEP = b"a = " + b"[" * 100_000
KINDS = ["missing", "directory", "fifo", "zero", "null", "socket", "latin1", "huge", "deep",
         "binary", "empty", "number", "types", "zero byte"]  # fmt: skip


def make(kind: str, folder: Path) -> str:
    """A file that no setting can mean, of this kind."""
    path = folder / "wrong"
    contents = {"latin1": b'memory = "\xe4"\n', "huge": b"#" * (3 << 20), "deep": DEEP,
                "binary": bytes(range(256)), "empty": b"", "number": b"a = 1\n",
                "types": b"servers = [1]\nmemory = [1]\n"}  # fmt: skip
    if kind in contents:
        path.write_bytes(contents[kind])
        path.chmod(0o600)
    elif kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path, 0o600)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    elif kind in ("zero", "null"):
        return f"/dev/{kind}"
    elif kind == "zero byte":
        return "a\0b"
    return str(path)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Settings that are right."""
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder, ["blue"])
    return {"keys": f"{folder}/server.key", "tenants": f"{folder}/tenants.toml"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_that_a_setting_names_may_be_of_any_kind(
    kind, refused, not_chosen, capsys, keys, tmp_path
):
    wrong = make(kind, tmp_path)
    if kind != "empty":
        not_chosen("settings", "--settings", wrong)
    for setting in ("keys", "tenants", "admin_token_file"):
        files = {} if setting == "admin_token_file" else keys
        given = {**files, setting: wrong}
        flags = [f"--{name.replace('_', '-')}={path}" for name, path in given.items()]
        refused(setting, *QUIET, *flags)
    if kind != "zero byte":
        address = f"tcp://127.0.0.1:1?keys={wrong}"
        assert kvferry(["stats", "--server", address, "--timeout-s", "1"]) == 2
        err = capsys.readouterr().err
        assert err.startswith("kvferry stats: keys: ") and err.count("\n") == 1


# ── the numbers of every command ─────────────────────────────────────────────────────────

WRONG_NUMBERS = [*(text for text in TEXTS if text != "--"), "-1e-9", "1e300", "9" * 17]
"""Without "--", which argparse itself takes out of `--flag=--`."""


def numeric_flags() -> Iterator[tuple[str, str]]:
    for name in COMMANDS:
        for action in parser_for(name)._actions:
            assert action.type not in (int, float), f"{name} {action.dest}: Python's own reading"
            if action.type is not None and action.dest in (
                "timeout_s",
                "every_s",
                "seconds",
                "block",
            ):
                yield name, action.option_strings[0]


@pytest.mark.parametrize(("command", "flag"), [*numeric_flags()])
def test_a_wrong_number_is_wrong_usage_in_every_command(command, flag, capsys):
    zero = [] if flag == "--seconds" else ["0", "-0"]  # a bench of no time measures five times
    texts = WRONG_NUMBERS if flag in ("--every-s", "--seconds", "--block") else ["nan", "", "-5"]
    for text in [*texts, *zero]:
        with pytest.raises(SystemExit) as ended:
            kvferry([command, *(["ns"] if "pin" in command else []), f"{flag}={text}"])
        assert ended.value.code == 2
        assert flag in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["file://tmp/blocks", "/tmp/blocks"])
def test_a_bucket_in_a_folder_has_three_slashes(refused, folder):
    """With two of them the first part is a host, and the server would use the folder `/blocks`."""
    assert "file:///tmp/blocks" in refused("bucket", *QUIET, "--bucket", folder)
