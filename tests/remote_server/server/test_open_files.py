"""A process that may open few files: it logs that at start, keeps its cores, and recovers."""

import logging
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from descriptors import memfd, open_fds
from fake_server import eventually
from lane_peer import has_ipv6
from server_process import cpu_s
from wire_peer import REGION_BYTES, TICKETS_BYTES, LocalConnection, Peer

from remote_server import plain_text, process_limits, protocol
from remote_server.errors import ConfigError
from remote_server.plain_text import FewLines
from remote_server.process_limits import KEPT_BACK, Entrance, check_file_sizes, warn_if_too_few
from remote_server.protocol import Attach, NotAttached
from remote_server.server.shm.endpoint import BACKLOG
from remote_server.values import GiB, MiB

pytestmark = pytest.mark.real_time

SERVE = [sys.executable, "-m", "remote_server", "--bind", "tcp://127.0.0.1:*", "--memory", "16MiB",
         "--admin", "off"]  # fmt: skip


def limited(limit: int, value: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(limit, (value, value))


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []

    def start(limit: int, value: int, *flags: str) -> subprocess.Popen[str]:
        processes.append(subprocess.Popen(
            [*SERVE, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=limited(limit, value),
        ))  # fmt: skip
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


# ── the server's own sockets ─────────────────────────────────────────────────────────────


@pytest.fixture
def crowd() -> Iterator[list[socket.socket]]:
    """Sockets that are closed when the test is over."""
    crowd: list[socket.socket] = []
    yield crowd
    for each in crowd:
        each.close()


def test_a_server_without_descriptors_takes_no_core_and_serves_again(start, context, crowd):
    process = start(resource.RLIMIT_NOFILE, 100)
    endpoint = process.stdout.readline().split()[3]
    port = int(endpoint.rpartition(":")[2])

    def come() -> bool:
        """A few more, fewer than may wait; whether all descriptors are taken."""
        for _ in range(24):
            crowd.append(socket.socket())
            crowd[-1].setblocking(False)
            with suppress(BlockingIOError):
                crowd[-1].connect(("127.0.0.1", port))
        time.sleep(0.01)
        return len(os.listdir(f"/proc/{process.pid}/fd")) > 75

    eventually(come)
    said = ""
    while "new connections wait" not in said:
        said = process.stderr.readline()
        assert said, "it ended"
    before, ours = cpu_s(process.pid), cpu_s(os.getpid())
    while cpu_s(os.getpid()) < ours + 0.3:
        pass  # a process that spins gets as much of the processor as this one
    assert cpu_s(process.pid) - before < 0.1, "something spins"
    for each in crowd:
        each.close()
    peer = Peer(context, endpoint)
    peer.hello()
    assert peer.put([1]).created == 1
    assert peer.stats().counters["accept_failed"] > 0


def test_too_few_files_to_start_is_one_line_that_names_the_limit(start):
    """Also for those libzmq would miss: it ends the process without a word of ours."""
    for number in (8, 11, 14, 23):
        _, errors = (process := start(resource.RLIMIT_NOFILE, number)).communicate(timeout=30)
        *_, last = errors.splitlines()
        assert process.returncode == 2, errors
        complaint = f"python -m remote_server: open files: a limit of {number} is too few"
        assert last.startswith(complaint), errors
        assert "Traceback" not in errors


def test_the_limit_that_is_named_is_enough(start):
    _, errors = start(resource.RLIMIT_NOFILE, 23).communicate(timeout=60)
    (enough,) = re.findall(r"it takes at least (\d+)", errors)
    process = start(resource.RLIMIT_NOFILE, int(enough))
    assert "ready on" in process.stdout.readline()


def test_a_limit_of_file_sizes_is_named_with_the_setting(start):
    _, errors = (process := start(resource.RLIMIT_FSIZE, 1 * MiB)).communicate(timeout=30)
    assert process.returncode == 2
    assert errors.startswith("python -m remote_server: memory: it needs a file of 16.2 MiB")
    assert "ulimit -f" in errors and errors.count("\n") == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("filters", ["allowed", "refused"])
def test_an_entrance_drops_who_comes_and_takes_who_waits(monkeypatch, host, filters):
    """A kernel may refuse a filter to all but root, and one does so here in any case."""
    if ":" in host and not has_ipv6():
        pytest.skip("no IPv6 on this host")
    if filters == "refused":
        monkeypatch.setattr(process_limits, "_SO_ATTACH_FILTER", 9999)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, backlog=16) as listener:
        address = listener.getsockname()[:2]
        entrance = Entrance(listener.fileno())
        try:
            with socket.create_connection(address) as waiting:
                entrance.shut_out()
                assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
                with pytest.raises(TimeoutError):
                    socket.create_connection(address, timeout=0.1)
                accepted, _ = listener.accept()
                accepted.close()
                waiting.close()
            monkeypatch.setattr(process_limits, "num_open", lambda: soft)
            assert not entrance.open_again()
            monkeypatch.setattr(process_limits, "num_open", lambda: 10)
            assert entrance.open_again()
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)
            with socket.create_connection(address, timeout=60) as late:
                accepted, _ = listener.accept()
                with accepted:
                    late.sendall(b"!")
                    assert accepted.recv(1) == b"!"
        finally:
            entrance.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_soft_limit_is_raised_to_the_hard_one_but_for_what_is_kept_back():
    code = "from remote_server.process_limits import *; raise_limit(); print(may_open(), backlog())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096)),
    )  # fmt: skip
    may_open, backlog = map(int, done.stdout.split())
    assert may_open == 4096 - KEPT_BACK
    assert backlog < KEPT_BACK, "all who wait must find a descriptor"


def test_what_does_not_fit_is_said_once_with_what_would(caplog, monkeypatch):
    monkeypatch.setattr(process_limits, "may_open", lambda: 1024)
    assert not warn_if_too_few(512, 512)
    assert warn_if_too_few(4096, 300)
    (record,) = caplog.records
    assert "4096 connections and up to 300 other files" in record.getMessage()
    assert "--max-connections 724" in record.getMessage()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (GiB, GiB))
    with pytest.raises(ConfigError, match=r"^cpu_pool: it needs a file of 2\.0 GiB"):
        check_file_sizes(2 * GiB, "cpu_pool")


# ── the local socket ─────────────────────────────────────────────────────────────────────


def test_engines_that_all_come_back_at_once_wait_in_the_local_socket(server, peer):
    name = peer.hello().local_socket
    local = server.tenants[""].local
    waiting = []
    server.loop_calls.call(lambda: local._poller.unregister(local._number)).result(30)
    local._listening = False
    local._watch_listener = lambda: None
    try:
        for _ in range(BACKLOG):
            one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            waiting.append(one)
            one.setblocking(False)
            one.connect(f"\0{name}")  # or BlockingIOError: no room
    finally:
        for one in waiting:
            one.close()
        del local._watch_listener


def test_those_who_are_refused_again_and_again_fill_no_log(server, peer, caplog):
    name = peer.hello().local_socket
    caplog.set_level(logging.INFO)
    for _ in range(50):
        connection = LocalConnection(name)
        connection.send(b"\xc1", [])
        assert isinstance(connection.receive()[0], NotAttached)
        connection.close()
    lines = [one for one in caplog.records if "stays on TCP" in one.getMessage()]
    assert len(lines) <= plain_text.LINES
    assert peer.stats().counters["regions_refused"] == 50


def test_lines_that_are_left_out_are_counted_in_the_next(caplog):
    now = [0.0]
    lines = FewLines(logging.getLogger("x"), lambda: now[0])
    for _ in range(plain_text.LINES + 1000):
        lines.say(logging.WARNING, "%s knocks", "he")
    now[0] += plain_text.EVERY_S
    lines.say(logging.WARNING, "%s knocks", "he")
    assert [one.getMessage() for one in caplog.records] == [
        *(["he knocks"] * plain_text.LINES), "he knocks (and 1,000 lines like it before)"
    ]  # fmt: skip


def test_descriptors_that_find_no_room_are_named_as_that(server, peer):
    files = [memfd(REGION_BYTES), memfd(TICKETS_BYTES)]
    local = LocalConnection(peer.hello().local_socket)
    eventually(lambda: server.tenants[""].local._pending)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    attach = protocol.encode_local(Attach(protocol=2, region_bytes=REGION_BYTES, client="x"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(files) + 1, hard))
    fill = []
    try:
        while True:
            fill.append(os.dup(0))
    except OSError:
        pass
    try:
        local.send(attach, files)
        reply, _ = local.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in (*fill, *files):
            os.close(fd)
    assert isinstance(reply, NotAttached)
    assert "files open" in reply.reason
    assert open_fds() < soft


# ── a client of many servers ─────────────────────────────────────────────────────────────

_FLEETS = """
import logging, resource
from remote_server.client import ClientConfig
from remote_server.fleet.fleet import Fleet
from remote_server.fleet.server_list import WatchedList

logging.basicConfig(format="%(message)s")
for num_servers, hard in ((4, 4096), (40, 4096), (40, 400)):
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    servers = WatchedList(f"tcp://k-{{0..{num_servers - 1}}}.invalid:5757")
    Fleet(servers, ClientConfig("tcp://127.0.0.1:1", quiet=True)).close(60)
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def test_a_client_of_many_servers_raises_the_soft_limit_that_is_too_low_for_them():
    """And warns where the hard limit is too low as well."""
    done = subprocess.run(
        [sys.executable, "-c", _FLEETS], capture_output=True, text=True, timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    few, many, too_many = map(int, done.stdout.split())
    assert few == 256 < too_many < many
    assert done.stderr.count("a list of 40 servers may need 600 open files") == 1
