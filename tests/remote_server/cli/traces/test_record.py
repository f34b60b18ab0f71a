"""`kvferry record`: its file, its ends, and what no reader of the file learns."""

import base64
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fake_server import FakeServer, eventually
from memory_server import memory_server

from remote_server.cli.__main__ import main
from remote_server.cli.traces import record
from remote_server.cli.traces.record_file import TraceFile
from remote_server.cli.traces.record_listen import NoStore
from remote_server.client import ClientConfig, RemoteClient
from remote_server.errors import ConfigError
from remote_server.prompt_keys import Recipe
from remote_server.protocol import MAX_FRAME_BYTES, Declined, PutOutcome, Record, Stretch
from remote_server.server.reports import recording
from remote_server.server.server import Server
from remote_server.shm.region import SharedRegion

pytestmark = pytest.mark.real_time

PATIENCE_S = 60.0
NAMESPACE = "a-secret-model@9f2c"
BLOCK_BYTES = 4096
RECIPE = Recipe("sha256", "0", 16, ((0, 16),))
TOKENS = Random(7).choices(range(10_000, 99_999), k=16 * 40)
HASHES = RECIPE.hashes(TOKENS)
KEYS = RECIPE.keys(HASHES)[0].keys


class Engine:
    """A client that looks its prompts up and puts the rest, as an engine does."""

    def __init__(self, endpoint: str, **config: Any) -> None:
        self.client = RemoteClient(ClientConfig(endpoint, client_name="a-secret-host", **config))
        self.client.declare(NAMESPACE, BLOCK_BYTES, {"model_name": "a-secret-name"})
        eventually(lambda: self.client.ready)

    def prompt(self, keys: Sequence[bytes]) -> int:
        """The number of its blocks that were found."""
        chain = [Stretch(len(keys), 0, 0, 16)]
        found = self.client.lookup(NAMESPACE, keys, chain=chain, timeout_s=PATIENCE_S)
        prefix = found.result(PATIENCE_S).prefix
        if prefix:
            rows = [memoryview(bytearray(BLOCK_BYTES)) for _ in keys[:prefix]]
            got = self.client.get(NAMESPACE, keys[:prefix], rows, stall_s=60, timeout_s=PATIENCE_S)
            assert len(got.result(PATIENCE_S).landed) == prefix
        if keys[prefix:]:
            self.put(keys[prefix:], first=prefix)
        return prefix

    def put(self, keys: Sequence[bytes], first: int = 0, **rows: Any) -> Any:
        given = rows.get("rows") or [memoryview(bytes(BLOCK_BYTES)) for _ in keys]
        chain = [Stretch(len(keys), 0, first * 16, 16)]
        done = self.client.put(
            NAMESPACE, keys, given, chain=chain, deferred=False, timeout_s=PATIENCE_S
        )
        return done.result(PATIENCE_S)


@pytest.fixture
def engine(server: Server) -> Iterator[Engine]:
    engine = Engine(server.endpoint)
    yield engine
    engine.client.close()


class Running:
    """The command on a thread, from its first query on."""

    def __init__(self, stop: threading.Event, path: Path, flags: Sequence[str]) -> None:
        self._stop = stop
        self.path = path
        self.status: int | None = None
        arguments = ["record", str(path), "--timeout-s", "60", *flags]
        self._thread = threading.Thread(target=lambda: setattr(self, "status", main(arguments)))
        self._thread.start()

    def stop(self) -> None:
        """As the first Ctrl-C does."""
        self._stop.set()

    def end(self) -> int:
        self._thread.join(PATIENCE_S)
        assert self.status is not None, "it goes on"
        return self.status

    def lines(self) -> list[dict[str, Any]]:
        return lines_of(self.path)


def lines_of(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    assert text.endswith(b"\n")
    return [json.loads(line) for line in text.splitlines()]


Begin = Callable[..., Running]


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Begin]:
    """Begins the command on a server of this process, and returns once that remembers requests."""
    running: list[Running] = []
    monkeypatch.setattr(record, "POLL_S", 0.01)

    @contextmanager
    def its_own(stops: Iterator[threading.Event]) -> Iterator[threading.Event]:
        yield next(stops)

    stops = [threading.Event() for _ in range(4)]
    given = iter(stops)
    monkeypatch.setattr(record, "_stopped_by_signals", lambda: its_own(given))

    def begin(server: Server, *flags: str, name: str = "trace.jsonl") -> Running:
        one = Running(
            stops[len(running)], tmp_path / name, ["--server", server.endpoint, *flags]
        )  # fmt: skip
        running.append(one)
        eventually(one.path.exists, "it has begun")
        return one

    yield begin
    for one in running:
        one.stop()
        one.end()


def test_what_an_engine_asks_for_is_in_the_file(server, engine, begin, capsys):
    engine.prompt(KEYS[:3])
    running = begin(server)
    assert engine.prompt(KEYS[:5]) == 3
    engine.put(KEYS[5:7], first=5)
    assert engine.prompt(KEYS[:7]) == 7
    running.stop()
    assert running.end() == 0
    first, one, answer, two, last = running.lines()
    assert first["kvferry_trace"] == 1
    assert first["tiers"] == {"memory": server.store.memory.stats().budget_bytes}
    assert last == {"end": True, "requests": 3, "lost": 0}
    shown = [(line["type"], len(line["hash_ids"]), line["found"]) for line in (one, answer, two)]
    assert shown == [("lookup", 5, 3), ("put", 2, 0), ("lookup", 7, 7)]
    assert one["hash_ids"] + answer["hash_ids"] == two["hash_ids"]
    assert [one["input_length"], answer["input_length"]] == [80, 112]
    assert one["block_bytes"] == BLOCK_BYTES
    out = capsys.readouterr().out
    assert "2 lookups of 192 tokens, 83.3% found, 1 puts" in out


def spellings(key: bytes) -> Iterator[bytes]:
    """How a key may be written; whole, and the ends of 8 bytes that events of engines have."""
    for part in (key, key[:32], key[:8], key[-8:], key[24:32]):
        yield part
        yield from (part.hex().encode(), part.hex().upper().encode())
        yield base64.b64encode(part).rstrip(b"=")
        yield base64.urlsafe_b64encode(part).rstrip(b"=")
        for order in ("big", "little"):
            for signed in (False, True):
                yield b"%d" % int.from_bytes(part, order, signed=signed)


def test_a_reader_shows_that_no_token_or_key_of_a_prompt_is_in_the_file(server, engine, begin):
    one, other = begin(server), begin(server, name="other.jsonl.gz")
    engine.prompt(KEYS[:20])
    engine.put(KEYS[20:], first=20)
    engine.prompt(KEYS)
    for running in (one, other):
        running.stop()
        assert running.end() == 0
    text = one.path.read_bytes()
    assert sum(line.get("type") == "lookup" for line in one.lines()) == 2
    found = [key for key in (*KEYS, *HASHES) for way in spellings(key) if way in text]
    assert not found
    for separator in (",", ", ", " "):
        for place in range(len(TOKENS) - 1):
            pair = separator.join(map(str, TOKENS[place : place + 2]))
            assert pair.encode() not in text
    assert b"secret" not in text and server.endpoint.encode() not in text
    ids = [
        {each for line in running.lines() for each in line.get("hash_ids", ())}
        for running in (one, other)
    ]
    assert len(ids[0]) == len(ids[1]) == len(KEYS) and not ids[0] & ids[1]


def test_only_its_owner_can_read_the_file(server, begin):
    assert begin(server).path.stat().st_mode & 0o777 == 0o600


def test_an_existing_file_is_refused_before_anything_else(tmp_path, capsys):
    path = tmp_path / "trace"
    path.write_text("mine")
    assert main(["record", str(path), "--server", "127.0.0.1:1"]) == 2
    assert "exists, and is not overwritten" in capsys.readouterr().err
    assert path.read_text() == "mine"
    with pytest.raises(ConfigError, match="exists"):
        TraceFile(path, 1 << 20)


def test_a_folder_that_is_not_there_is_named(server, tmp_path, capsys):
    path = tmp_path / "none" / "trace"
    assert main(["record", str(path), "--server", server.endpoint, "--timeout-s", "60"]) == 2
    assert f"{path} cannot be made: No such file" in capsys.readouterr().err


def test_without_a_server_there_is_no_file(tmp_path):
    path = tmp_path / "trace"
    assert main(["record", str(path), "--server", "127.0.0.1:1"]) == 3
    assert not path.exists()


def num_queries(server: Server) -> int:
    return server.loop_calls.call(server.snapshot).result(60).operations["record"].count


def test_a_server_that_goes_away_ends_the_file_with_what_there_is(begin, capsys):
    with memory_server() as server:
        engine = Engine(server.endpoint)
        running = begin(server)
        engine.prompt(KEYS[:5])
        asked = num_queries(server)
        eventually(lambda: num_queries(server) > asked + 1, "it has received the answer")
        engine.client.close()
    assert running.end() == 1
    assert [line.get("type") for line in running.lines()] == [None, "lookup", None]
    assert running.lines()[-1] == {"end": True, "requests": 1, "lost": 0}
    assert "the server is gone" in capsys.readouterr().err


def test_requests_that_the_server_could_not_keep_are_counted(server, engine, begin, monkeypatch):
    running_out = 20 * recording.BYTES_PER_REQUEST
    monkeypatch.setattr(recording, "RING_BYTES", running_out)
    monkeypatch.setattr(record, "POLL_S", PATIENCE_S)
    running = begin(server)
    eventually(lambda: num_queries(server) == 2, "it waits")
    for number in range(50):
        engine.client.lookup(
            NAMESPACE, KEYS[number % 40 :][:1], chain=[Stretch(1, 0, number, 16)],
            timeout_s=PATIENCE_S,
        ).result(PATIENCE_S)  # fmt: skip
    running.stop()
    assert running.end() == 0
    last = running.lines()[-1]
    assert 0 < last["requests"] < 20 and last["lost"] == 50 - last["requests"]


def test_a_command_that_was_away_too_long_ends_its_file(server, engine, begin, capsys):
    """Suspended, for example: what came meanwhile is in no file."""
    running = begin(server)
    engine.prompt(KEYS[:5])
    asked = num_queries(server)
    eventually(lambda: num_queries(server) > asked + 1, "it has received the answer")
    recorder = server.tenants[""].handlers.recorder
    server.loop_calls.call(lambda: setattr(recorder, "recording", None)).result(PATIENCE_S)
    assert running.end() == 1
    assert running.lines()[-1] == {"end": True, "requests": 1, "lost": 0}
    assert "no query of this command reached the server" in capsys.readouterr().err


def test_a_time_of_its_own_ends_it(server, tmp_path):
    path = tmp_path / "trace"
    flags = ["--server", server.endpoint, "--timeout-s", "60", "--for", "0.05"]
    assert main(["record", str(path), *flags]) == 0
    assert lines_of(path)[-1] == {"end": True, "requests": 0, "lost": 0}


def test_an_older_server_is_named_as_what_it_is(tmp_path, capsys):
    with FakeServer() as fake:
        fake.rules[Record] = fake.refuse("bad_message")
        path = tmp_path / "trace"
        flags = ["--server", fake.endpoint, "--timeout-s", "60"]
        assert main(["record", str(path), *flags]) == 2
    assert "this server is older than the command: it cannot record" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_the_file_ends_before_it_is_too_large(server, engine, begin, capsys, name):
    running = begin(server, "--max-bytes", "64KiB", name=name)
    for number in range(200):
        keys = [b"%04d %027d" % (number, each) for each in range(200)]
        chain = [Stretch(len(keys), 0, 0, 16)]
        engine.client.lookup(NAMESPACE, keys, chain=chain, timeout_s=PATIENCE_S).result(PATIENCE_S)
    running.stop()
    assert running.end() == 0
    assert 48 * 1024 < running.path.stat().st_size <= 64 * 1024
    *_, last = running.lines()
    assert last == {"end": True, "requests": len(running.lines()) - 2, "lost": 0}
    assert "as large as --max-bytes allows" in capsys.readouterr().out


def test_a_compressed_file_is_never_larger_than_its_bound(tmp_path):
    """Also of lines that do not compress."""
    chance = Random(1)
    for number in range(20):
        path = tmp_path / f"{number}.gz"
        bound = chance.randrange(2_000, 300_000)
        with TraceFile(path, bound) as file:
            while file.write(line := chance.randbytes(chance.randrange(1, 20_000))):
                pass
            file.end(b"x" * 200)
        assert bound - len(line) * 1.2 - 1_000 < path.stat().st_size <= bound
        assert zlib.decompress(path.read_bytes(), 31).endswith(b"x" * 200)


def test_a_full_disk_ends_it_with_a_line(server, engine, begin, capsys, monkeypatch):
    running = begin(server)
    real = os.write

    def full(fd: int, data: Any) -> int:
        if os.readlink(f"/proc/self/fd/{fd}") == str(running.path):
            raise OSError(28, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", full)
    engine.prompt(KEYS[:5])
    running.stop()
    assert running.end() == 1
    assert "cannot be written any more: No space left on device" in capsys.readouterr().err


def test_ctrl_c_ends_the_file_well(server, engine, tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    arguments = ["record", str(path), "--server", server.endpoint, "--timeout-s", "60"]
    with subprocess.Popen(
        [sys.executable, "-m", "remote_server.cli", *arguments],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    ) as command:  # fmt: skip
        assert command.stdout is not None
        assert "Ctrl-C ends it" in command.stdout.readline()
        engine.prompt(KEYS[:5])
        command.send_signal(signal.SIGINT)
        out, _ = command.communicate(timeout=PATIENCE_S)
    assert command.returncode == 0
    assert "1 lookups of 80 tokens" in out
    assert [line.get("found") for line in lines_of(path)] == [None, 0, None]


# ── without a cache server ───────────────────────────────────────────────────────────────


@pytest.fixture
def no_store() -> Iterator[Server]:
    with NoStore("127.0.0.1:*") as server:
        yield server
    assert server.store.counters["refused_internal"] == 0


@pytest.mark.parametrize("lanes", [0, 2])
def test_a_server_that_stores_nothing_declines_and_records_puts(no_store, begin, lanes):
    engine = Engine(no_store.endpoint, lanes=lanes)
    running = begin(no_store)
    for _ in range(2):
        assert engine.prompt(KEYS[:5]) == 0
    put = engine.put(KEYS[5:9], first=5)
    engine.client.close()
    assert put.declined == {Declined.RECORDED: 4}
    assert put.outcomes == [PutOutcome.DECLINED] * 4
    running.stop()
    assert running.end() == 0
    lines = running.lines()[1:-1]
    assert [(line["type"], len(line["hash_ids"])) for line in lines] == [
        ("lookup", 5), ("lookup", 5), ("put", 4),
    ]  # fmt: skip
    assert no_store.tiers()["memory"].blocks == 0


def test_it_takes_declarations_of_any_size_and_no_memory_for_them(no_store):
    with closing(RemoteClient(ClientConfig(no_store.endpoint))) as client:
        client.declare(NAMESPACE, MAX_FRAME_BYTES)
        eventually(lambda: client.ready)
        row = memoryview(bytes(MAX_FRAME_BYTES))
        put = client.put(NAMESPACE, KEYS[:1], [row], deferred=False, timeout_s=PATIENCE_S)
        assert put.result(PATIENCE_S).declined == {Declined.RECORDED: 1}
    written = os.stat(no_store.tenants[""].storage.arena.fd).st_blocks * 512
    assert written < MAX_FRAME_BYTES


def test_of_an_engine_on_its_host_it_reads_no_byte_of_a_block(no_store):
    engine = Engine(no_store.endpoint, transport="shm")
    with closing(SharedRegion(8 * BLOCK_BYTES)) as region:
        engine.client.register(region.view, region.fd)
        eventually(lambda: engine.client.ready)
        rows = [region.view[at * BLOCK_BYTES :][:BLOCK_BYTES] for at in range(8)]
        put = engine.put(KEYS[:8], rows=rows)
        assert put.declined == {Declined.RECORDED: 8}
        assert engine.client.transport == "shm"
        assert no_store.store.counters["put_created"] == 0
        assert no_store.tenants[""].snapshot().queues.shared_puts == 0
        del rows
        engine.client.close()


def test_listen_serves_and_records_and_refuses_other_hosts(begin, capsys, tmp_path, monkeypatch):
    with memory_server() as free:
        endpoint = free.endpoint
    running = begin(free, "--listen", endpoint)  # on the port that has just become free
    engine = Engine(endpoint)
    assert engine.prompt(KEYS[:5]) == 0
    engine.client.close()
    running.stop()
    assert running.end() == 0
    first, line, _ = running.lines()
    assert first["tiers"] == {} and len(line["hash_ids"]) == 5
    assert f"listening on {endpoint}" in capsys.readouterr().out
    assert main(["record", str(tmp_path / "x"), "--listen", "tcp://0.0.0.0:5757"]) == 2
    assert "record on the engine's host" in capsys.readouterr().err
