"""A failure inside the server costs its own request: the server serves, counts and reports it."""

import threading
from collections.abc import Iterator

import aiohttp
import pytest
from admin_http import Http, served
from copy_jobs import CountedJob
from disk_server import LENGTH, put_all, small_server
from fake_server import eventually
from tenancy import tenancy
from wire_peer import Peer, SharedPeer, block, key

from remote_server import guard
from remote_server.guard import MANY_FAILURES, Guard
from remote_server.server.config import ServerConfig
from remote_server.server.entrance import tenant_keys
from remote_server.server.server import Server
from remote_server.server.transfer.copier import Copier
from remote_server.server.transfer.streamed_get import StreamedGet
from remote_server.store import io_threads as threads_module
from remote_server.store.io_threads import Job as DiskJob
from remote_server.store.io_threads import Priority
from remote_server.store.pages import Scratch
from remote_server.values import MiB

pytestmark = pytest.mark.real_time

assert tenancy


class Broken:
    """Put in the place of a method: raises `times` times, and does what it should from then on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, times: int = 1):
        self.left = times
        real = getattr(owner, name)

        def instead(*args: object, **kwargs: object) -> object:
            if self.left:
                self.left -= 1
                raise MemoryError("no room")
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, instead)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(guard, "PAUSE_S", 0.0)


@pytest.fixture
def server(tmp_path) -> Iterator[Server]:
    """With a disk, and an age at which blocks are removed. Its books are not checked: what failed
    half-way is not undone."""
    with small_server(tmp_path, ttl_s=3600.0) as server:
        yield server


@pytest.fixture
def other(connect) -> Peer:
    peer = connect()
    peer.hello("other", block_bytes=LENGTH)
    return peer


def errors(server: Server) -> int:
    return server._guard.counters["internal_errors"]


def serves(peer: Peer, number: int = 1000) -> bool:
    peer.put([number], "other", length=LENGTH)
    return peer.get([number], "other")[1] == [(0, block(number, LENGTH))]


# ── the guard ────────────────────────────────────────────────────────────────────────────


def fail() -> int:
    raise ValueError("x")


def test_a_part_that_fails_again_and_again_is_ailing_until_it_works(caplog):
    now = [0.0]
    paused: list[float] = []
    watched = Guard(lambda: now[0], paused.append)
    for _ in range(MANY_FAILURES - 1):
        assert watched.run("copying", fail, 7) == 7
    assert (watched.ailing, paused) == ([], [])
    watched.run("copying", fail, 7)
    assert watched.ailing == [f"copying failed {MANY_FAILURES} times in a row"]
    assert len(paused) == 1, "a part that is due in every turn would keep a core busy"
    assert len(caplog.records) == 1, "and fill the log"
    now[0] += guard.LOG_AGAIN_S
    watched.run("copying", fail, 7)
    assert len(caplog.records) == 2
    assert watched.run("copying", lambda: 5, 7) == 5
    assert watched.ailing == []
    assert watched.counters["internal_errors"] == MANY_FAILURES + 1


def test_requests_that_fail_often_are_ailing_also_where_others_succeed_between_them(caplog):
    now = [0.0]
    watched = Guard(lambda: now[0])
    for _ in range(MANY_FAILURES):
        assert watched.ailing == []
        watched.request_failed(ValueError("x"))
        watched.run("copying", lambda: 5, 7)
    assert watched.ailing == [f"{MANY_FAILURES} requests failed within {guard.OFTEN_S:g} s"]
    assert len(caplog.records) == 1
    assert watched.counters["internal_errors"] == MANY_FAILURES
    now[0] += guard.OFTEN_S + 1
    assert watched.ailing == []


def test_the_end_of_one_copy_that_fails_leaves_the_others_theirs():
    copier = Copier()
    seen: list = []
    copier.submit(CountedJob(seen, "a"))
    copier.submit(CountedJob(seen, "b", on_end=fail))
    copier.submit(CountedJob(seen, "c"))
    while copier.copy_some():
        pass
    assert seen == ["a", ("a", False), "b", "c", ("c", False)]
    assert copier.turns.num_bytes == 0


# ── each completion on the loop ──────────────────────────────────────────────────────────


def test_the_end_of_a_put_over_shared_memory(server, connect, other, monkeypatch):
    shared = SharedPeer(connect())
    shared.peer.hello("ns")
    broken = Broken(monkeypatch, server.store.puts, "end")
    refused = shared.peer.ask(shared.put_message([1]))
    assert (broken.left, refused.code) == (0, "internal")
    assert serves(other)
    assert errors(server) == 1
    assert shared.put([2]).created == 1


def test_the_end_of_a_disk_job(server, other):
    pool = server.tenants[""].storage.disk.pool
    done: list[int] = []

    def finish(_):
        raise KeyError("finish")

    def submit():
        pool.submit(DiskJob(Priority.READ, lambda scratch: 1, finish))
        pool.submit(DiskJob(Priority.READ, lambda scratch: 2, done.append))

    server.loop_calls.call(submit).result(30)
    eventually(lambda: done == [2])
    assert serves(other)
    assert errors(server) == 1


def test_one_of_those_who_wait_for_a_block_of_the_disk(server, connect, other):
    peer = connect()
    put_all(peer, 17)  # the first has left memory
    fetches = server.store.fetches
    came: list[int] = []

    def ask():
        fetches.fetch("big", [key(0)], fail_with)
        fetches.fetch("big", [key(0)], lambda blocks: came.append(len(blocks)))

    def fail_with(_):
        raise OSError("a get's end")

    server.loop_calls.call(ask).result(30)
    eventually(lambda: came == [1])
    assert errors(server) == 1
    assert serves(other)


def test_sending_to_one_client(server, connect, other, monkeypatch):
    peer = connect()
    peer.hello("other", block_bytes=LENGTH)
    peer.put([1, 2], "other", length=LENGTH)
    Broken(monkeypatch, StreamedGet, "next_message")
    peer.send_get([1], "other")
    eventually(lambda: errors(server) == 1)
    assert serves(other)
    peer.receive()  # the summary of what was given up
    assert peer.get([2], "other")[1] == [(0, block(2, LENGTH))]


def test_an_attach_and_the_end_of_a_region(server, connect, other, monkeypatch):
    local = server.tenants[""].local
    broken = Broken(monkeypatch, local, "_read")
    assert SharedPeer(connect()).token, "it is read again in the next turn"
    assert not broken.left
    leaving = SharedPeer(connect())
    Broken(monkeypatch, local._attached_regions, "gone")
    leaving.connection.close()
    eventually(lambda: errors(server) == 2)
    assert SharedPeer(connect()).token
    assert serves(other)


@pytest.mark.parametrize("name", ["expire_some", "check"])
def test_what_is_looked_after_now_and_then(server, other, monkeypatch, name):
    broken = Broken(monkeypatch, server.store.tier_stack, name)
    server._upkeep._next_check = 0.0
    for number in range(5):
        assert serves(other, number)
    eventually(lambda: not broken.left)
    assert serves(other)
    assert other.stats().counters["lookup_keys"] == 0


def test_the_questions_of_the_door(tenancy, monkeypatch):
    server = tenancy.start()
    broken = Broken(monkeypatch, server._auth, "_judge")
    first = tenancy.peer("a")
    eventually(lambda: not broken.left)
    second = tenancy.peer("a")
    second.hello()
    assert second.put([1]).created == 1
    first.socket.close()


def test_a_tenants_file_that_cannot_be_read_in_any_way(tenancy, monkeypatch):
    server = tenancy.start()
    peer = tenancy.peer("a")
    peer.hello()
    monkeypatch.setattr(tenant_keys, "keys_of_tenants", lambda path: fail())
    tenancy.write(a="", b="")
    server._auth._reload_at = 0.0
    assert peer.put([1]).created == 1


# ── /health ──────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def ask(no_old_answers):
    """`/health` of a server, from this test's own loop."""
    async with aiohttp.ClientSession() as session:

        async def ask(admin):
            status, _, text = await Http(session, admin.url).get("/health")
            return status, text

        yield ask


async def test_health_tells_of_a_part_that_fails_every_time(ask, monkeypatch):
    with served(ttl_s=3600.0) as (server, admin):
        assert await ask(admin) == (200, "alive\n")
        broken = Broken(monkeypatch, server.store.tier_stack, "expire_some", times=10**9)
        eventually(lambda: server._wakeup.wake() or server._guard.ailing)
        status, text = await ask(admin)
        assert status == 503 and text.startswith("ageing failed ")
        broken.left = 0
        eventually(lambda: server._wakeup.wake() or not server._guard.ailing)
        assert (await ask(admin))[0] == 200


async def test_health_tells_of_requests_that_fail_while_others_do_not(ask, context, monkeypatch):
    with served() as (server, admin):
        peer = Peer(context, server.endpoint)
        peer.hello()
        broken = Broken(monkeypatch, server.store.puts, "begin", times=MANY_FAILURES)
        while broken.left:
            assert peer.put([1]).code == "internal"
            assert peer.lookup([1]).prefix == 0
        assert await ask(admin) == (
            503, f"{MANY_FAILURES} requests failed within {guard.OFTEN_S:g} s\n"
        )  # fmt: skip
        assert peer.put([1]).created == 1
        assert peer.stats().counters["internal_errors"] == MANY_FAILURES


async def test_health_tells_of_a_thread_of_the_disk_that_has_ended(ask, monkeypatch, tmp_path):
    real, left = Scratch, [True]

    def scratch():
        if left and left.pop():
            raise MemoryError
        return real()

    monkeypatch.setattr(threads_module, "Scratch", scratch)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with served(disk=str(tmp_path / "disk"), disk_bytes=64 * MiB) as (server, admin):
        pool = server.tenants[""].storage.disk.pool
        server.loop_calls.call(lambda: pool.submit(DiskJob(Priority.READ, len, print))).result(30)
        eventually(lambda: server._disk_threads.num_dead)
        assert await ask(admin) == (503, "1 disk threads have ended\n")


async def test_health_tells_of_a_memory_that_is_populated_no_further(ask, monkeypatch):
    from remote_server.shm import mapping

    def touch(*_):
        raise MemoryError

    monkeypatch.setattr(mapping, "touch_gently", touch)
    with served(populate=True) as (server, admin):
        server._population.join()
        assert await ask(admin) == (503, "the thread that populates the memory has failed\n")


def test_stopped_threads_are_not_dead_ones(tmp_path):
    config = ServerConfig(bind="tcp://127.0.0.1:*", memory=MiB, disk=str(tmp_path / "d"),
                          disk_bytes=64 * MiB)  # fmt: skip
    with Server(config) as server:
        pass
    assert server._ended_threads() == []
