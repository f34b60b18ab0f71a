"""docs/upgrade.md is true: its numbers are the code's, and two releases side by side agree."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kv_connector
from kv_connector.identity.namespace import ROW_FORMAT
from remote_server import protocol
from remote_server.client.connection.session import OTHER_PROTOCOL_RETRY_S
from remote_server.protocol import EngineReport, Hello, StatsReply
from remote_server.store.bucket.packs.layout import COMPRESSED, PLAIN
from remote_server.store.disk.layout import FORMAT_VERSION
from remote_server.version import version

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "upgrade.md").read_text()
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


def numbers_of(row: str) -> list[str]:
    """Those in the column `number` of one row of the table."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {row}")]
    return re.findall(r"[\d.]*\d", line.split(" | ")[2])


@pytest.mark.parametrize(
    ("row", "numbers"),
    [
        ("engine and server", [protocol.PROTOCOL_VERSION]),
        ("server and its disk", [FORMAT_VERSION]),
        ("server and packs", [PLAIN, COMPRESSED]),
        ("two engines", [int(ROW_FORMAT)]),
        ("kvferry and vLLM", [*kv_connector.TESTED_VLLM]),
    ],
)
def test_the_numbers_of_the_page_are_those_of_the_code(row: str, numbers: list[Any]):
    assert numbers_of(row) == [str(number) for number in numbers]


def test_the_changelog_begins_with_this_version_and_its_numbers():
    newest = CHANGELOG.partition("\n## ")[2]
    assert newest.startswith(f"{kv_connector.__version__}\n")
    declared = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None and declared[1] == kv_connector.__version__
    assert version() in (declared[1], "not installed")
    assert f"Protocol {protocol.PROTOCOL_VERSION}, disk format {FORMAT_VERSION}" in newest
    assert f"row format {ROW_FORMAT}" in newest


def test_the_wait_of_a_refused_engine_is_that_of_the_page():
    assert OTHER_PROTOCOL_RETRY_S == 60 and "tries again every minute" in PAGE


# ── the release before, by the messages that it knows ────────────────────────────────────


class ReportOf01(msgspec.Struct, array_like=True, frozen=True):
    software: str = ""
    prompt_tokens: int = 0
    reused: dict[str, int] = {}


class HelloOf01(msgspec.Struct, tag_field="type", tag="hello", kw_only=True):
    request_id: int
    protocol: int
    namespace: str
    block_bytes: int
    report: ReportOf01 | None = None


class StatsReplyOf01(msgspec.Struct, tag_field="type", tag="stats_reply", kw_only=True):
    request_id: int
    epoch: str
    server: str
    counters: dict[str, int]


def test_a_server_of_0_1_reads_what_an_engine_of_0_2_sends():
    report = EngineReport("vLLM 0.33.0", 1000, {"pool": 10}, given_up=3)
    hello = Hello(request_id=1, protocol=2, namespace="m", block_bytes=4096, report=report)
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(hello), type=HelloOf01)
    assert read.report == ReportOf01("vLLM 0.33.0", 1000, {"pool": 10})


def test_a_command_of_0_2_shows_a_server_of_0_1_without_engines_and_the_other_way_round():
    of_01 = StatsReplyOf01(request_id=1, epoch="e", server="kvferry 0.1.0", counters={"a": 1})
    older = msgspec.to_builtins(of_01) | {"uptime_s": 1.0, "tiers": {}, "namespaces": {}}
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(older), type=StatsReply)
    assert read.engines == [] and read.counters == {"a": 1}
    newer = StatsReply(request_id=1, epoch="e", server="kvferry 0.2.0", uptime_s=1.0, tiers={},
                       namespaces={}, counters={"a": 1})  # fmt: skip
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(newer), type=StatsReplyOf01).counters == {
        "a": 1
    }
