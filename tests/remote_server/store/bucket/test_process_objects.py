"""Calls of the object store in a process of their own, which nothing of a store ends for long."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import zmq
from bucket_helpers import (
    ROW_BYTES,
    bucket_server,
    chain_of,
    find_packs,
    folder_url,
    hello,
    write_packs,
)
from client_helpers import Clock
from disk_helpers import BOUND_S
from fake_server import eventually
from huge_answers import huge_answers
from wire_peer import Peer, block

from remote_server import process_limits
from remote_server.errors import ConfigError
from remote_server.protocol import KeyState
from remote_server.server.server import Server
from remote_server.store.bucket import opening
from remote_server.store.bucket.objects import process_objects
from remote_server.store.bucket.objects.objects import BucketError, Objects
from remote_server.store.bucket.objects.process_objects import ProcessObjects

pytestmark = pytest.mark.real_time

Call = Callable[[Objects], object]

CALLS: dict[str, Call] = {
    "put": lambda objects: objects.put("a", memoryview(b"1")),
    "read": lambda objects: objects.read("a", 0, 10),
    "head": lambda objects: objects.read_head("a", 10),
    "size": lambda objects: objects.size_of("a"),
    "remove": lambda objects: objects.remove(["a", "b"]),
    "list": lambda objects: [*objects.listing("a")],
    "folders": lambda objects: objects.folders("a"),
}


@pytest.fixture
def now() -> Clock:
    return Clock()


@pytest.fixture
def objects(tmp_path: Path, now: Clock) -> Iterator[ProcessObjects]:
    objects = ProcessObjects(folder_url(tmp_path), 2, now)
    yield objects
    objects.close()


def pid_of(objects: ProcessObjects) -> int:
    """Its process, which has been started."""
    (pid,) = processes(objects.url)
    return int(pid)


@pytest.mark.parametrize(
    ("status", "kinds"),
    [(200, ["list", "folders", "remove"]), (404, [kind for kind in CALLS if kind != "size"])],
)
def test_an_answer_longer_than_all_memory_is_a_failure_of_its_call(
    status: int, kinds: list[str], now: Clock, monkeypatch: pytest.MonkeyPatch
):
    with huge_answers(status) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        objects = ProcessObjects("s3://any/kv", 1, now)
        with closing(objects):
            for kind in kinds:
                with pytest.raises(BucketError):
                    CALLS[kind](objects)
                now.now += process_objects.LONGEST_PAUSE_S  # the next one is made again
            if status == 404:
                assert objects.size_of("a") is None, "the answer to HEAD has no body"


def test_a_server_serves_on_above_a_store_whose_lists_end_the_client(
    context: zmq.Context, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    with huge_answers() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with bucket_server("s3://any/kv") as server:
            peer = hello(Peer(context, server.endpoint))
            eventually(lambda: "is lost, and started again" in caplog.text)
            peer.put([1], length=ROW_BYTES)
            assert peer.get([1])[1] == [(0, block(1, ROW_BYTES))]


def test_a_process_that_was_killed_is_started_again_after_a_pause_that_doubles(
    objects: ProcessObjects, now: Clock
):
    objects.put("a", memoryview(b"12345"))
    for number, pause_s in enumerate((0.5, 1.0, 2.0), 1):
        os.kill(pid_of(objects), signal.SIGKILL)
        with pytest.raises(BucketError, match="is lost"):
            objects.read("a", 0, 5)
        now.now += 0.9 * pause_s
        with pytest.raises(BucketError, match="is to be started again"):
            objects.read("a", 0, 5)
        now.now += 0.1 * pause_s
        if number < 3:
            process, channel = objects._take()  # starts it; no call ends well
            process.give_back(channel)
    assert bytes(objects.read("a", 0, 5)) == b"12345"
    os.kill(pid_of(objects), signal.SIGKILL)
    with pytest.raises(BucketError):
        objects.read("a", 0, 5)
    now.now += 0.5
    assert bytes(objects.read("a", 0, 5)) == b"12345", "the pause is short again"


def test_the_bytes_of_a_read_are_the_readers_until_it_leaves(
    objects: ProcessObjects, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(process_objects, "KEPT_BYTES", 1 << 20)
    first, second = os.urandom(3 << 20), os.urandom(3 << 20)
    objects.put("a", memoryview(first))
    objects.put("b", [memoryview(second[:100]), second[100:]])
    with objects.reading("a", 0, len(first)) as data:
        with objects.reading("b", 1, len(second)) as other:
            assert other == second[1:]
        assert data == first
        failed = threading.Event()

        def third() -> None:
            try:
                objects.read("a", 0, 1)
            finally:
                failed.set()

        with objects.reading("b", 0, 10):  # all channels are lent
            thread = threading.Thread(target=third)
            thread.start()
            assert not failed.is_set()
            assert data == first
        thread.join(BOUND_S)
        assert failed.is_set(), "it has waited for a channel"
    assert not any(data[:4096]), "its memory was given back to the machine"


def test_the_process_ends_with_its_server(tmp_path: Path, context: zmq.Context):
    url = folder_url(tmp_path)
    write_packs(url, context, 1)
    with bucket_server(url) as server:
        find_packs(hello(Peer(context, server.endpoint)), 1)
        assert len(processes(url)) == 1
    assert processes(url) == []


def processes(url: str) -> list[str]:
    """Of the store `url`."""
    found = subprocess.run(
        ["pgrep", "-f", f"store_calls {url} "], capture_output=True, text=True, check=False
    )
    return found.stdout.split()


@contextmanager
def above_pipes(
    folder: Path, context: zmq.Context, num_packs: int
) -> Iterator[tuple[Server, Peer]]:
    """A server that knows so many packs, each of which is a pipe now: no read of one ends. No
    process is left when it has ended."""
    url = folder_url(folder)
    write_packs(url, context, num_packs)
    with bucket_server(url) as server:
        peer = hello(Peer(context, server.endpoint))
        peer.stats_once(lambda s: s.counters["bucket_names"] == num_packs)
        for path in [*Path(url.removeprefix("file://")).rglob("*")]:
            if path.is_file() and path.name != "=clock":
                path.unlink()
                os.mkfifo(path)
        yield server, peer
    assert processes(url) == []


def test_a_store_that_hangs_holds_back_neither_its_rows_for_ever_nor_the_end_of_the_server(
    tmp_path: Path, context: zmq.Context, monkeypatch: pytest.MonkeyPatch
):
    with above_pipes(tmp_path, context, 2) as (server, peer):
        monkeypatch.setattr(process_objects, "LONGEST_CALL_S", 0.5)  # of calls that hang
        peer.lookup(range(16), chain=chain_of(16))
        peer.stats_once(lambda s: s.counters["bucket_failed_lost"] > 0)
        (below,) = server.store.tier_stack.below
        peer.stats_once(lambda _: not below.tier.busy)
        assert not any(peer.lookup(range(16), chain=chain_of(16)).states), "none is pending"


def test_the_end_of_a_server_waits_a_moment_for_a_store_that_hangs(
    tmp_path: Path, context: zmq.Context, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(opening, "LEAVE_S", 0.1)
    with above_pipes(tmp_path, context, 1) as (_, peer):
        assert peer.lookup(range(8), chain=chain_of(8)).states == bytes([KeyState.PENDING]) * 8


def test_a_server_is_refused_where_there_are_no_descriptors_for_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """libzmq ends the server when it misses some."""
    enough = process_limits.num_open() + process_limits.FILES_TO_START + opening.BUCKET_FILES // 2
    monkeypatch.setattr(process_limits, "may_open", lambda: enough)
    with bucket_server(""):
        pass
    with pytest.raises(ConfigError, match="too few to start"), bucket_server(folder_url(tmp_path)):
        raise AssertionError("it has begun")
