"""Settings of a server as flags, variables and files give them: a checked configuration, or one
sentence that begins with the setting."""

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_server.errors import ConfigError
from remote_server.server import settings
from remote_server.server.config import MAX_TENANTS, ServerConfig, read_tenants
from remote_server.server.settings import Chosen, choose

pytest_plugins = ["fuzzing"]

KINDS = {field.name: field.type for field in msgspec.structs.fields(ServerConfig)}
KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"

PIECES = (
    "", " ", "0", "1", "-1", "-0", "0.0", "1e3", "1e308", "1e400", "nan", "inf", "true", "off",
    "no", "65536", "1MiB", "2 GiB", "16KiB", "1.5GiB", "1TB", "9" * 18, "9" * 19, "9" * 5_000,
    "KiB", "8EiB", "0x10", "1_0", "１２", "²", "lru", "learned", "twice", "all", "zstd", "none",
    "debug", "auto", "tcp://", "127.0.0.1", "0.0.0.0", "[::1]", "[::", "localhost", "*", ":", ":*",
    ":1", ":5757", "http://", "s3://", "gs://b", "az://c/d", "file:///", "file://", "memory://",
    "b/p", "/", "?", "@", "#", "u:p@", "%41", "=", "\0", "\x7f", "\x1b[2J", "\udcff", "é", "\n",
    '"', "'", "\\", "x" * 300, "1" * 80, "a", "a.b", "-", "[v1]", "//[",
)  # fmt: skip

RIGHT = [
    ("memory", "1MiB"), ("memory", "8GiB"), ("disk_bytes", "64MiB"), ("bucket", "s3://b/p"),
    ("bucket", "file:///tmp/x"), ("pack", "64KiB"), ("pack_compress", "zstd"), ("ttl_s", "0.5"),
    ("bind", "tcp://[::1]:*"), ("name", "cache-1"), ("admin", "off"), ("lanes", "127.0.0.1:1"),
    ("log_level", "debug"), ("disk", "/\x7f\t\u2028\\\""), ("bucket_days", "1e-300"),
    ("max_connections", "9" * 18),
]  # fmt: skip

texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=2), max_size=3).map("".join)
names = st.sampled_from([*KINDS])
pairs = st.sampled_from(RIGHT) | st.tuples(names, texts)
layers = st.lists(pairs, max_size=3).map(dict)
values = st.recursive(
    st.booleans() | st.integers(-2, 1 << 64) | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names | texts, inner, max_size=2),
    max_leaves=3,
)
tables = layers | st.dictionaries(names | st.sampled_from(["memry", "servers"]), values, max_size=3)
files = st.tuples(tables, st.dictionaries(st.sampled_from(["a", "b", "\n"]), tables, max_size=2))


def toml(value: object) -> str:
    """`value` in the syntax of TOML; text that TOML cannot have is written as JSON."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml(k)} = {toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, str | bool):
        return json.dumps(value).replace("\x7f", "\\u007f")
    return str(value)


def lines_of(table: Mapping[str, object]) -> list[str]:
    return [f"{toml(name)} = {toml(value)}" for name, value in table.items()]


def flags_of(given: Mapping[str, Any]) -> argparse.Namespace:
    """The flags as `argparse` gives them."""
    fields: dict[str, Any] = dict.fromkeys(KINDS)
    fields |= {
        name: bool(text) if KINDS.get(name) is bool else text for name, text in given.items()
    }
    return argparse.Namespace(**{"settings": None, **fields})


def refusal(error: ConfigError) -> None:
    setting = re.match(r"(--)?([a-z_]+)[: ]", str(error))
    assert setting is not None and setting[2] in (*KINDS, "settings"), error


def judge(chosen: Chosen, path: Path) -> None:
    """It can be printed as a file that gives it again, and has tenants or a refusal."""
    path.write_text(chosen.as_toml())
    assert choose(flags_of({"settings": str(path)}), {}).config == chosen.config
    try:
        assert read_tenants(chosen.config)
    except ConfigError as error:
        assert chosen.config.tenants
        refusal(error)


def test_settings_of_any_source_are_checked_or_one_sentence(
    fuzz: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings.log, "warning", lambda *_: None)
    path, again = tmp_path / "s.toml", tmp_path / "again.toml"

    @given(layers, layers, st.none() | files, st.integers(0, 9))
    def read(flags: Any, variables: Any, file: Any, damage: int) -> None:
        environment = {f"KVFERRY_{name.upper()}": text for name, text in variables.items()}
        if file is not None:
            common, servers = file
            lines = lines_of(common)
            for name, table in servers.items():
                lines += [f"[servers.{toml(name)}]", *lines_of(table)]
            data = "\n".join(lines).encode()
            path.write_bytes(data[:-1] if damage == 9 else data)
            environment["KVFERRY_SETTINGS"] = str(path)
        try:
            chosen = choose(flags_of(flags), environment)
        except ConfigError as error:
            refusal(error)
        else:
            judge(chosen, again)

    fuzz.run(read, examples=150)


entries = st.fixed_dictionaries(
    {},
    optional={
        "keys": st.sampled_from([[KEY], [], [KEY, KEY], ["x" * 40], [1]]) | values,
        "memory": st.sampled_from(["1MiB", "4MiB", "7MiB", 0, -1]) | values,
        "disk": values,
        "namespaces": st.lists(texts, max_size=2) | values,
        "namespace_memory": st.sampled_from(["1MiB"]) | values,
        "ttl_s": st.floats() | values,
    },
)
tenant_names = st.sampled_from(["a", "b", "blue-1", "A", "", "\n"]) | texts


def test_a_file_of_tenants_divides_the_budgets_or_is_one_sentence(
    fuzz: Any, tmp_path: Path
) -> None:
    path = tmp_path / "tenants.toml"
    path.touch(0o600)
    config = ServerConfig(memory=8 << 20, disk="/d", keys="k", tenants=str(path))

    @given(st.dictionaries(tenant_names, entries | values, max_size=3), st.integers(0, 9))
    def read(tables: Any, damage: int) -> None:
        lines = []
        for name, table in tables.items():
            is_table = isinstance(table, dict)
            lines += [f"[{toml(name)}]", *lines_of(table)] if is_table else lines_of({name: table})
        data = "\n".join(lines).encode()
        path.write_bytes(data[1:] if damage == 9 else data)
        try:
            tenants = read_tenants(config)
        except ConfigError as error:
            refusal(error)
        else:
            assert 1 <= len(tenants) <= MAX_TENANTS
            assert sum(one.memory for one in tenants) <= config.memory
            assert sum(one.disk for one in tenants) <= config.disk_bytes
            assert all(0 <= one.namespace_memory <= one.memory for one in tenants)

    fuzz.run(read, examples=150)
