"""Names that control a terminal, forge a log line or mislead a reader: refused, and harmless."""

import io
import json
import logging
import re
import time
import unicodedata
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
from descriptors import memfd
from fake_server import FakeServer, eventually
from wire_peer import REGION_BYTES, TICKETS_BYTES, LocalConnection

from remote_server import protocol
from remote_server.cli.__main__ import main
from remote_server.cli.commands import COMMANDS
from remote_server.client import ClientConfig, RemoteClient
from remote_server.errors import ConfigError
from remote_server.histograms import Timings
from remote_server.plain_text import PlainFormatter, forbidden_in, plain

pytestmark = pytest.mark.real_time

EVIL = ["\x1b[2J", "\r", "\n", "\0", "\x7f", "\x9b31m", "\u202e", "\u2066", "\u200f", "\u200b",
        "\u2028", "\u2029", "\ufeff", "\u00ad"]  # fmt: skip
ALL_EVIL = "".join(EVIL)
HARMLESS = ["modèle", "模型", "модель", "a b", "a\u00a0b", "🚀", r"a\x1b", "e\u0301"]


def obeyed(text: str) -> list[str]:
    """What in `text` a terminal or a reader would not see as itself; line breaks are ours."""
    return [one for one in text if one != "\n" and unicodedata.category(one) in
            ("Cc", "Cf", "Cs", "Zl", "Zp")]  # fmt: skip


# ── valid names ──────────────────────────────────────────────────────────────────────────


def test_hello_refuses_them_in_every_text_that_it_has(peer):
    for evil in EVIL:
        for fields in (
            {"namespace": f"a{evil}"},
            {"client": f"a{evil}"},
            {"fingerprint": {f"a{evil}": "1", "a": evil}},
        ):
            refused = peer.hello(**fields)
            assert isinstance(refused, protocol.Error), fields
            assert refused.code == "bad_request"
            assert f"U+{ord(evil[0]):04X}" in refused.message
            assert not obeyed(refused.message)
    assert list(peer.stats().namespaces) == ["ns"]


def test_every_other_text_is_a_name(peer):
    for name in HARMLESS:
        assert isinstance(peer.hello(name, client=name, fingerprint={name: name}), protocol.Welcome)
        assert plain(name) == name
        assert not forbidden_in(name)


def test_a_client_that_offers_its_memory_cannot_forge_a_log_line(peer, caplog):
    name = peer.hello().local_socket
    for evil in EVIL:
        files = [memfd(REGION_BYTES), memfd(TICKETS_BYTES)]
        local = LocalConnection(name)
        message = protocol.Attach(
            protocol=2, client=f"x{evil}ERROR of another", region_bytes=REGION_BYTES
        )
        with caplog.at_level(logging.INFO):
            local.send(protocol.encode_local(message), files)
            reply, _ = local.receive()
        assert isinstance(reply, protocol.NotAttached)
        assert not obeyed(reply.reason)
    assert all(not obeyed(record.getMessage()) for record in caplog.records)


def test_our_client_refuses_to_declare_what_no_server_accepts():
    with closing(RemoteClient(ClientConfig("tcp://127.0.0.1:1", quiet=True))) as client:
        for evil in EVIL:
            for namespace, facts in ((f"a{evil}", {}), ("a", {"b": evil}), ("a", {evil: "b"})):
                with pytest.raises(ConfigError, match=r"U\+") as refused:
                    client.declare(namespace, 4096, facts)
                assert not obeyed(str(refused.value))


# ── what is printed all the same ─────────────────────────────────────────────────────────


def evil_stats(epoch: str) -> protocol.StatsReply:
    """From a server that puts it into every text that a reply has."""
    share = protocol.TierShare(blocks=1, used_bytes=1)
    tier = protocol.TierStats(
        budget_bytes=1, used_bytes=1, blocks=1, pending=0, pinned=0, free_slabs=0
    )
    one = protocol.NamespaceStats(
        block_bytes=1, tiers={ALL_EVIL: share}, client=ALL_EVIL, fingerprint={"a": ALL_EVIL}
    )
    other = protocol.NamespaceStats(
        block_bytes=1, tiers={ALL_EVIL: share}, client=ALL_EVIL,
        engines={ALL_EVIL: {"b": ALL_EVIL}},
        fingerprint={"a": "b", ALL_EVIL: ALL_EVIL, "model_name": ALL_EVIL},
    )  # fmt: skip
    return protocol.StatsReply(
        request_id=1, epoch=epoch, protocol=2, server=ALL_EVIL, uptime_s=1.0, time_s=1.0,
        tiers={ALL_EVIL: tier},
        namespaces={ALL_EVIL: one, f"b{ALL_EVIL}": other, "m": one},
        counters={f"declined{ALL_EVIL}": 3, "lookup_keys": 1, "lookup_hits": 1},
        bucket=protocol.BucketStats(
            paused_s=1.0, last_failure=ALL_EVIL, last_failure_s=1.0, names=1, packs_waiting=1,
            writable_bytes=1,
            calls={ALL_EVIL: protocol.BucketCalls(
                results={ALL_EVIL: 1}, num_bytes=1, times=Timings([], 0.0)
            )},
        ),
        eviction=protocol.EvictionStats(
            rule=ALL_EVIL, switches=1, found={ALL_EVIL: 0.5}, policy_bytes=1, within_s=[60.0],
            returns={ALL_EVIL: [0.5]},
        ),
        what_if=protocol.WhatIf(
            over_s=1.0, times=[0.5, 1.0, 2.0], budgets={ALL_EVIL: 1}, rule=ALL_EVIL, seen_bytes=1,
            model_bytes=1, total=evil_found(),
            namespaces={ALL_EVIL: evil_found(), "m": evil_found()},
        ),
    )  # fmt: skip


def evil_found() -> protocol.FoundAt:
    curve = {ALL_EVIL: [0.1, 0.2, 0.3]}
    return protocol.FoundAt(
        asked=1_000_000, found={ALL_EVIL: 1}, rule=curve, lru=curve, missed={ALL_EVIL: 0.5}
    )


@pytest.fixture
def evil_server():
    with FakeServer(epoch="e") as fake:
        refusal = protocol.Error(request_id=1, epoch="e", code=ALL_EVIL, message=ALL_EVIL)

        def with_id(reply):
            def send(asked):
                number = asked.message.request_id
                fake.send(asked, type(reply)(**{
                    **{name: getattr(reply, name) for name in reply.__struct_fields__},
                    "request_id": number,
                }))  # fmt: skip

            return send

        fake.rules |= {protocol.Stats: with_id(evil_stats("e")), protocol.Keep: with_id(refusal),
                       protocol.Clear: with_id(refusal)}  # fmt: skip
        yield fake


RUNS = ["stats", "stats --json", "stats --what-if", "why", "why --json", "doctor", "doctor --json",
        "clear --all --yes",
        "clear --namespace nobody", "pin m", "unpin m", "watch", "watch --json",
        "top --once"]  # fmt: skip


@pytest.mark.parametrize("arguments", RUNS)
def test_no_command_prints_what_a_terminal_obeys(evil_server, capsys, monkeypatch, arguments):
    if arguments.startswith("watch"):

        def stop(_):
            raise KeyboardInterrupt

        clock = SimpleNamespace(sleep=stop, time=time.time, strftime=time.strftime)
        monkeypatch.setattr("remote_server.cli.figures.watch.time", clock)
    # What never comes, shared memory and lanes, is not waited for.
    monkeypatch.setattr("remote_server.cli.checks.doctor._within", lambda _, so: so())
    main([*arguments.split(), "--server", evil_server.endpoint, "--timeout-s", "60"])
    out, err = capsys.readouterr()
    assert out or err
    assert not obeyed(out + err)
    assert "\\u202e" in out + err
    if "--json" in arguments:
        json.loads(out)


def test_every_command_that_prints_a_reply_is_among_these():
    tried = {run.split()[0] for run in RUNS}
    quiet = COMMANDS.keys() - tried
    own = {"bucket", "drain"}  # the tests of the bucket have them
    assert quiet == {"init", "serve", "keys", "advise", "bench", "completion", "record", *own}, (
        "no server's text is in these"
    )


def test_commands_print_through_one_seam():
    folder = Path(main.__code__.co_filename).parent
    for file in folder.rglob("*.py"):
        if file.name not in ("output.py", "bench.py"):
            assert not re.search(r"\bprint\(", file.read_text()), file


def test_the_reason_that_an_engine_logs_is_one_line(evil_server, caplog):
    with closing(RemoteClient(ClientConfig(evil_server.endpoint))) as client:
        client.declare("m", 4096)
        eventually(lambda: client.ready)
        error = client.clear("m", timeout_s=60).exception(60)
    assert not obeyed(str(error))


def test_a_log_record_is_one_line_and_a_traceback_is_indented():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PlainFormatter("%(levelname)s %(message)s"))
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.warning("a client: %s", f"x\nERROR forged{ALL_EVIL}")
    try:
        raise ValueError(f"x\nERROR forged{ALL_EVIL}")
    except ValueError:
        logger.exception("failed")
    first, second, *rest = stream.getvalue().split("\n")
    assert first.startswith(r"WARNING a client: x\x0aERROR forged\x1b[2J")
    assert second == "ERROR failed"
    assert all(line.startswith("    ") for line in rest[:-1])
    assert not obeyed(stream.getvalue())


async def test_stats_over_http_are_printable_ascii(http):
    async with aiohttp.ClientSession() as session, session.get(f"{http.url}/stats") as answer:
        text = await answer.text()
    assert text.isascii()
    assert not obeyed(text)
