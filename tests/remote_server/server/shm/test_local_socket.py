"""Who may attach memory to a server, and what is left of those who may not: nothing."""

import fcntl
import gc
import mmap
import os
import socket
import threading
import time
from functools import partial

import pytest
from descriptors import memfd, open_fds
from fake_server import PATIENCE_S, eventually
from lane_peer import LaneClock
from memory_server import memory_server
from smaps import map_at, mapped
from wire_peer import REGION_BYTES, TICKETS_BYTES, LocalConnection, Peer, SharedPeer

from remote_server import protocol
from remote_server.protocol import Attach, Attached, NotAttached
from remote_server.server.shm import endpoint as local_socket_module
from remote_server.shm import mapping, region
from remote_server.values import MiB

pytestmark = pytest.mark.real_time

GOOD = protocol.encode_local(Attach(protocol=2, client="test", region_bytes=REGION_BYTES))


@pytest.fixture
def clock() -> LaneClock:
    return LaneClock()


@pytest.fixture
def server(clock):
    """Its time stands still."""
    with memory_server(clock) as server:
        yield server


@pytest.fixture
def name(peer):
    return peer.hello().local_socket


@pytest.fixture
def files():
    """The two files of a good attach, closed in the end."""
    files = [memfd(REGION_BYTES), memfd(TICKETS_BYTES)]
    yield files
    for fd in files:
        os.close(fd)


@pytest.fixture
def no_leaks(peer, server, clock):
    """Afterwards there are no more descriptors than before, no regions, and the server serves."""
    peer.lookup([1])
    gc.collect()  # what earlier tests left open
    before = open_fds()
    yield
    tenant = server.tenants[""]

    def nothing_is_left(_: object) -> bool:
        clock.now += local_socket_module.REST_S
        return not (open_fds() > before or len(tenant.regions) or tenant.local.pending)

    peer.stats_once(nothing_is_left)
    assert peer.put([1]).created == 1


def refusal(connection: LocalConnection, *, again: bool = False) -> str:
    reply, files = connection.receive()
    assert isinstance(reply, NotAttached)
    assert reply.again == again
    assert not files
    assert connection.ended()
    connection.close()
    return reply.reason


# ── a good attach ────────────────────────────────────────────────────────────────────────


def test_a_region_is_attached_and_its_arena_can_be_read_and_by_nobody_written(
    name, files, server, no_leaks
):
    connection = LocalConnection(name)
    reply, (arena,) = connection.attach(files)
    assert isinstance(reply, Attached)
    assert reply.epoch == server.store.epoch
    size = os.fstat(arena).st_size
    assert size == reply.arena_bytes
    assert os.fstat(arena).st_mode & 0o777 == 0o600, "other users could open it anew"
    mmap.mmap(arena, size, prot=mmap.PROT_READ).close()
    with pytest.raises(PermissionError):
        mmap.mmap(arena, size)
    writable = os.open(f"/proc/self/fd/{arena}", os.O_RDWR)  # we are its owner, after all
    with pytest.raises(PermissionError):
        mmap.mmap(writable, size)
    with pytest.raises(PermissionError):
        os.write(writable, b"x")
    with pytest.raises(PermissionError):
        os.ftruncate(writable, 4096)
    with pytest.raises(PermissionError):
        fcntl.fcntl(writable, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    for fd in files:  # those that are attached cannot be truncated
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    for fd in (arena, writable):
        os.close(fd)
    connection.close()


def test_an_attach_may_come_in_two_parts(name, files, peer, no_leaks):
    connection = LocalConnection(name)
    connection.send(GOOD[:7], files[:1])
    peer.lookup([1])
    peer.lookup([1])  # the loop has had a turn for the first part
    connection.send(GOOD[7:], files[1:])
    reply, (arena,) = connection.receive()
    assert isinstance(reply, Attached)
    os.close(arena)
    connection.close()


def test_each_region_has_a_name_of_its_own_that_nobody_can_guess(name, files):
    tokens = set()
    for _ in range(3):
        connection = LocalConnection(name)
        reply, (arena,) = connection.attach(files)
        tokens.add(reply.region)
        os.close(arena)
        connection.close()
    assert len(tokens) == 3
    assert min(tokens) > 1 << 40


def test_the_map_ends_with_the_connection(name, files, peer, no_leaks):
    before = mapped("test")
    connection = LocalConnection(name)
    _, (arena,) = connection.attach(files)
    assert mapped("test") == before + 2
    os.close(arena)
    connection.close()
    peer.stats_once(lambda _: mapped("test") == before)


def test_a_client_that_talks_on_after_its_attach_is_cut_off(name, files, no_leaks):
    connection = LocalConnection(name)
    _, (arena,) = connection.attach(files)
    connection.send(b"more", [])
    assert connection.ended()
    os.close(arena)
    connection.close()


def resident_bytes(address: int, num_bytes: int) -> int:
    """What of a map needs no page fault any more, by the kernel's own account."""
    found = map_at(address)
    assert found["Range"] == f"{address:x}-{address + num_bytes:x}"
    return 1024 * int(found["Rss"].split()[0])


def test_the_pages_that_a_client_has_are_faulted_in_and_no_others_allocated(name, peer, server):
    size, used = 64 * MiB, 8 * MiB
    files = [memfd(size), memfd(TICKETS_BYTES)]
    os.pwrite(files[0], bytes(used), 16 * MiB)
    before = os.fstat(files[0]).st_blocks * 512
    connection = LocalConnection(name)
    reply, (arena,) = connection.attach(files, size)
    peer.lookup([1])  # answered after the loop's turn in which it attached
    mapped_region = server.tenants[""].regions.find(reply.region)
    eventually(lambda: resident_bytes(mapped_region.address, size) >= used)
    assert os.fstat(files[0]).st_blocks * 512 == before
    assert resident_bytes(mapped_region.address, size) == before
    for fd in (*files, arena):
        os.close(fd)
    connection.close()


# ── refusals ─────────────────────────────────────────────────────────────────────────────


def in_dev_shm(num_bytes: int) -> int:
    fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)
    os.ftruncate(fd, num_bytes)
    return fd


def a_pipe(_: int) -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


unsealed = partial(memfd, seals=0)
SIZE, TOO_MUCH = REGION_BYTES, 5 * os.sysconf("SC_PHYS_PAGES") * 4096


@pytest.mark.parametrize(
    ("region_file", "size", "tickets", "complaint"),
    [
        (partial(unsealed, SIZE), SIZE, memfd, "the region is not a memfd sealed"),
        (partial(memfd, SIZE), SIZE, unsealed, "the tickets file is not a memfd sealed"),
        (partial(in_dev_shm, SIZE), SIZE, memfd, "not a memfd"),
        (partial(a_pipe, SIZE), SIZE, memfd, "not a regular file"),
        (partial(memfd, SIZE), SIZE - 1, memfd, f"has {SIZE} bytes, not {SIZE - 1}"),
        (partial(memfd, SIZE), SIZE + 1, memfd, f"has {SIZE} bytes, not {SIZE + 1}"),
        (partial(memfd, SIZE), SIZE, lambda size: memfd(size - 8), "8184 bytes, not 8192"),
        (partial(memfd, TOO_MUCH), TOO_MUCH, memfd, "the most is"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_file_that_could_kill_its_reader_is_refused(
    name, no_leaks, region_file, size, tickets, complaint
):
    files = [region_file(), tickets(TICKETS_BYTES)]
    connection = LocalConnection(name)
    message = Attach(protocol=2, client="test", region_bytes=size)
    connection.send(protocol.encode_local(message), files)
    for fd in files:
        os.close(fd)
    assert complaint in refusal(connection)


def pass_patience(clock: LaneClock, peer: Peer) -> None:
    """Let the time for a complete attach pass, and the loop have a turn."""
    clock.now += local_socket_module.PATIENCE_S
    peer.lookup([1])
    peer.lookup([1])


def test_who_says_nothing_is_sent_away_and_delays_nobody(name, peer, server, clock, no_leaks):
    silent = [LocalConnection(name) for _ in range(6)]
    silent[-1].send(GOOD[:5], [])
    for _ in range(20):
        peer.lookup([1])
    peer.stats_once(lambda _: len(server.tenants[""].local._pending) == len(silent))
    assert peer.stats().counters["regions_refused"] == 0
    pass_patience(clock, peer)
    for connection in silent:
        assert "within 1 s" in refusal(connection, again=True)
    assert peer.stats().counters["regions_refused"] == len(silent)


def silent_ones(name: str, peer: Peer, clock: LaneClock, number: int) -> list[LocalConnection]:
    """Connections that send nothing, each accepted before the next ones come."""
    silent: list[LocalConnection] = []
    while len(silent) < number:
        silent += [LocalConnection(name) for _ in range(16)]
        let_accept(peer, clock)
    return silent


def let_accept(peer: Peer, clock: LaneClock) -> None:
    """Let the loop accept what waits, also when it rests after others."""
    for _ in range(2):
        clock.now += local_socket_module.REST_S
        peer.stats()


def test_silent_connections_keep_no_client_out(name, files, peer, clock, no_leaks):
    """Their places were theirs for a second, then the kernel's queue was full, and a client that
    connected got EAGAIN."""
    places = local_socket_module.MAX_PENDING
    silent = silent_ones(name, peer, clock, 2 * (places + local_socket_module.BACKLOG))
    connection = LocalConnection(name)
    connection.send(GOOD, files)
    let_accept(peer, clock)
    reply, (arena,) = connection.receive()
    assert isinstance(reply, Attached)
    counters = peer.stats_once(
        lambda s: s.counters["regions_displaced"] == len(silent) - places
    ).counters
    assert counters["regions_refused"] == len(silent) - places
    assert "needed its place" in refusal(silent[0], again=True)
    os.close(arena)
    for each in (*silent, connection):
        each.close()


def test_an_attach_that_comes_in_time_is_taken_before_its_place_is(
    name, files, peer, clock, no_leaks
):
    """The oldest connection has a place to lose, and has sent its attach by then."""
    slow = LocalConnection(name)
    peer.stats()
    slow.send(GOOD[:9], files)
    silent = silent_ones(name, peer, clock, local_socket_module.MAX_PENDING - 16)
    slow.send(GOOD[9:], [])
    silent += [LocalConnection(name) for _ in range(32)]
    reply, (arena,) = slow.receive()
    assert isinstance(reply, Attached)
    os.close(arena)
    for each in (*silent, slow):
        each.close()


def test_one_user_takes_no_place_of_another(name, peer, server, clock, no_leaks, monkeypatch):
    users = [1, 2]
    monkeypatch.setattr(local_socket_module.os, "getuid", lambda: 0)  # type: ignore[attr-defined]
    monkeypatch.setattr(
        local_socket_module, "user_of", lambda _: users.pop(0) if len(users) > 1 else users[0]
    )
    slow = LocalConnection(name)
    peer.stats_once(lambda _: len(users) == 1)
    silent = silent_ones(name, peer, clock, 3 * local_socket_module.MAX_PENDING)
    pending = server.tenants[""].local._pending.values()
    peer.stats_once(lambda _: len(pending) == local_socket_module.MAX_PENDING)
    assert next(iter(pending)).uid == 1
    for each in (*silent, slow):
        each.close()


def test_only_so_many_regions_are_attached(name, files, no_leaks, monkeypatch):
    monkeypatch.setattr(local_socket_module, "MAX_REGIONS", 2)
    early = LocalConnection(name)  # before there are so many
    attached = [LocalConnection(name) for _ in range(2)]
    for connection in attached:
        _, (arena,) = connection.attach(files)
        os.close(arena)
    reply, _ = early.attach(files)
    assert "2 regions are attached already" in reply.reason
    early.close()
    assert "2 regions are attached already" in refusal(LocalConnection(name), again=True)
    for connection in attached:
        connection.close()


def test_another_user_is_refused(name, files, no_leaks, monkeypatch):
    monkeypatch.setattr(local_socket_module.os, "getuid", lambda: 4242)  # type: ignore[attr-defined]
    monkeypatch.setattr(local_socket_module, "user_of", lambda _: 77)
    assert "belongs to user 4242, not 77" in refusal(LocalConnection(name))


def test_a_file_of_another_user_is_refused(monkeypatch, files):
    monkeypatch.setattr(region.os, "getuid", lambda: 4242)  # type: ignore[attr-defined]
    mapping.check_file(files[0], REGION_BYTES, os.fstat(files[0]).st_uid, "region")
    with pytest.raises(mapping.NotAttachable, match="belongs to user"):
        mapping.check_file(files[0], REGION_BYTES, 77, "region")


def test_without_a_thread_to_spare_an_attach_is_refused(name, files, no_leaks, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    maps = mapped("test")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        connection = LocalConnection(name)
        connection.send(GOOD, files)
        assert "can't start new thread" in refusal(connection)
    assert mapped("test") == maps


def test_without_descriptors_to_spare_it_waits_and_goes_on(name, files, peer, server, clock):
    accept, calls = server.tenants[""].local._listener.accept, []

    class Listener:
        def accept(self):
            calls.append(1)
            if len(calls) == 1:
                raise OSError(24, "Too many open files")
            return accept()

        def close(self):
            real.close()

    real, server.tenants[""].local._listener = server.tenants[""].local._listener, Listener()
    connection = LocalConnection(name)
    connection.send(GOOD, files)
    eventually(lambda: calls)
    for _ in range(20):
        peer.lookup([1])
    assert len(calls) == 1, "it does not spin"
    pass_patience(clock, peer)
    reply, (arena,) = connection.receive()
    assert isinstance(reply, Attached)
    os.close(arena)
    connection.close()


# ── without it ───────────────────────────────────────────────────────────────────────────


def test_a_server_without_shared_memory_says_so(context):
    with memory_server(shared_memory=False) as server:
        welcome = Peer(context, server.endpoint).hello()
        assert (welcome.transports, welcome.local_socket) == (["tcp"], "")


def test_where_there_are_no_abstract_sockets_everything_stays_on_tcp(context, monkeypatch, caplog):
    def refuse(*_):
        raise OSError("not here")

    monkeypatch.setattr(socket.socket, "listen", refuse)
    before = open_fds()
    with memory_server(lanes="off") as server:
        peer = Peer(context, server.endpoint)
        assert peer.hello().local_socket == ""
        assert peer.put([1]).created == 1
        peer.socket.close()
    assert "clients on this host use TCP" in caplog.text
    eventually(lambda: open_fds() <= before, "no descriptor is kept")


def test_a_server_that_stops_waits_for_the_maps_of_clients_that_left_before(context, monkeypatch):
    """Their threads are slow to unmap, as those of large regions are."""
    stopping, unmapped = threading.Event(), []

    def slowly(address, num_bytes):
        stopping.wait(PATIENCE_S)
        time.sleep(0.05)
        unmapped.append(address)

    monkeypatch.setattr(mapping, "unmap", slowly)
    with memory_server() as server:
        shared = SharedPeer(peer := Peer(context, server.endpoint))
        shared.connection.close()
        peer.stats_once(lambda s: s.counters["regions_gone"] == 1)
        stopping.set()
    assert len(unmapped) == 2, "the region or its tickets were still mapped"


def test_a_server_that_stops_lets_go_of_all_regions(context):
    maps = mapped("test")
    with memory_server() as server:
        shared = [SharedPeer(Peer(context, server.endpoint)) for _ in range(2)]
        own = mapped("test")
        assert own == maps + 8  # ours and the server's
    assert mapped("test") == maps + 4
    for each in shared:
        assert each.connection.ended()
        each.close()
