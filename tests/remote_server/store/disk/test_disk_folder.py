"""Whose the folder of a disk is, and that one server has it; and the clock that is kept in it."""

import errno
import fcntl
import os
import stat
from functools import partial
from pathlib import Path

import pytest
from descriptors import open_fds
from disk_helpers import RealDisk, budget_for
from disk_server import put_all, small_server
from fake_server import eventually
from wire_peer import Peer

from remote_server.errors import ConfigError
from remote_server.store.disk import directory as folder_module
from remote_server.store.disk import opening
from remote_server.store.disk.age_clock import AgeClock
from remote_server.store.disk.directory import TakenFolder, make_private
from remote_server.store.disk.opening import OpenDisk
from remote_server.store.tier import Written
from remote_server.values import MiB

pytestmark = pytest.mark.real_time

YEAR_NS = 365 * 86_400 * 10**9
BLOCK = 8192


def open_disk(folder: Path) -> OpenDisk:
    return OpenDisk(folder, 16 * MiB, wake=lambda: None)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# ── whose it is ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("bits", [0o770, 0o720, 0o702, 0o1777])
def test_a_folder_that_others_can_write_is_refused_and_left_as_it_is(tmp_path, bits):
    folder = tmp_path / "disk"
    folder.mkdir()
    folder.chmod(bits)
    with pytest.raises(ConfigError, match=rf"written by other users.*{bits:04o}.*chmod go-w"):
        open_disk(folder)
    assert os.listdir(folder) == []
    folder.chmod(0o755)
    open_disk(folder).close()


def test_a_folder_that_another_user_owns_is_refused_and_left_as_it_is(tmp_path, monkeypatch):
    folder = tmp_path / "disk"
    folder.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(ConfigError, match=r"belongs to user \d+, and this server runs as"):
            open_disk(folder)
    assert os.listdir(folder) == []


def test_the_folder_and_the_parents_that_a_server_makes_are_its_own_alone(tmp_path):
    before = os.umask(0)
    try:
        open_disk(tmp_path / "a" / "b" / "disk").close()
    finally:
        os.umask(before)
    assert [mode(tmp_path / name) for name in ("a", "a/b", "a/b/disk")] == [0o700] * 3
    assert mode(tmp_path / "a/b/disk/LOCK") == 0o600
    text = (tmp_path / "a/b/disk/README.txt").read_text()
    assert "can be deleted" in text and "kvferry" in text


def test_the_folder_above_the_tenants_folders_is_looked_at_as_well(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="written by other users"):
        make_private(tmp_path)


# ── one server has it ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("change", ["deleted", "replaced"])
def test_a_running_server_keeps_its_folder_whatever_becomes_of_lock(tmp_path, change):
    disk = open_disk(tmp_path)
    (tmp_path / "LOCK").unlink()
    if change == "replaced":
        (tmp_path / "LOCK").write_text("")
    with pytest.raises(ConfigError, match="in use by another server"):
        open_disk(tmp_path)
    disk.close()
    open_disk(tmp_path).close()


def test_a_server_of_the_version_before_is_respected_and_respects_us(tmp_path):
    """It locks the file LOCK, and not the directory."""
    with open(tmp_path / "LOCK", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(ConfigError, match="in use by another server"):
            open_disk(tmp_path)
    disk = open_disk(tmp_path)
    with open(tmp_path / "LOCK") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    disk.close()


def test_where_directories_cannot_be_locked_lock_is_enough(tmp_path, monkeypatch, caplog):
    def as_on_nfs(fd, flags):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(fd, flags)

    flock = fcntl.flock
    monkeypatch.setattr(folder_module.fcntl, "flock", as_on_nfs)  # type: ignore[attr-defined]
    disk = open_disk(tmp_path)
    assert "cannot be locked itself" in caplog.text
    with pytest.raises(ConfigError, match="in use by another server"):
        open_disk(tmp_path)
    disk.close()


def test_a_folder_that_is_renamed_under_a_server_stays_the_servers(tmp_path):
    """And another one that takes its name is not touched."""
    budget, segment_bytes = budget_for(4, 4, BLOCK)
    folder = tmp_path / "disk"
    folder.mkdir()
    with RealDisk(folder, budget, segment_bytes) as disk:
        disk.put(b"0", b"x" * BLOCK)
        folder.rename(tmp_path / "moved")
        folder.mkdir()
        for number in range(1, 9):
            assert disk.put(b"%d" % number, b"x" * BLOCK) is Written.OK
    assert os.listdir(folder) == []
    assert len(os.listdir(tmp_path / "moved")) == 3


def test_a_refused_folder_leaves_no_descriptor(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    before = open_fds()
    with pytest.raises(ConfigError):
        TakenFolder(tmp_path)
    # Threads of earlier tests may still close theirs.
    eventually(lambda: open_fds() <= before, "no descriptor is kept")


# ── the clock ────────────────────────────────────────────────────────────────────────────────


class Machine:
    """Its wall clock, which people set, and the time since it booted."""

    def __init__(self) -> None:
        self.boot_id, self.wall_ns, self.up_ns = "b1", 50 * YEAR_NS, 10**9

    def pass_s(self, seconds: int) -> None:
        self.wall_ns += seconds * 10**9
        self.up_ns += seconds * 10**9

    def clock(self, note: str = "") -> AgeClock:
        return AgeClock(note, boot_id=self.boot_id, since_boot=lambda: self.up_ns,
                        wall_clock=lambda: self.wall_ns)  # fmt: skip


@pytest.mark.parametrize("step", [-YEAR_NS, YEAR_NS])
def test_a_step_of_the_wall_clock_moves_no_age_within_a_server_nor_from_one_to_the_next(step):
    machine = Machine()
    first = machine.clock()
    assert first() == 50 * YEAR_NS
    machine.wall_ns += step
    machine.pass_s(5)
    assert first() == 50 * YEAR_NS + 5 * 10**9
    assert machine.clock(first.note())() == first()


def test_after_another_boot_or_with_a_damaged_note_the_wall_clock_is_asked():
    machine = Machine()
    note = machine.clock().note()
    machine.boot_id, machine.wall_ns, machine.up_ns = "b2", 51 * YEAR_NS, 7
    assert machine.clock(note)() == 51 * YEAR_NS
    for damaged in ("", "clock", "clock b2", "clock b2 x", "clock b2 -5", "\ufffd\0", "b2 5 clock"):
        assert machine.clock(damaged)() == 51 * YEAR_NS
    machine.boot_id = ""
    assert machine.clock("clock  5").note() == "", "boots cannot be told apart here"


def test_what_is_on_disk_grows_old_by_the_time_that_passes_and_by_no_step(
    tmp_path, context, monkeypatch
):
    machine = Machine()

    def states_with(wait_s: int) -> bytes:
        with small_server(tmp_path, ttl_s=3600.0) as server:
            peer = Peer(context, server.endpoint)
            peer.stats_once(lambda s: s.counters["disk_recovered"] == 2)
            machine.pass_s(wait_s)
            return peer.lookup([0, 1], "big").states

    monkeypatch.setattr(opening, "AgeClock", machine.clock)
    with small_server(tmp_path, ttl_s=3600.0) as server:
        put_all(Peer(context, server.endpoint), 2)
        machine.wall_ns += YEAR_NS
    assert states_with(1000) == b"\2\2", "a step of a year made them older"
    machine.wall_ns -= 2 * YEAR_NS
    assert states_with(1000) == b"\2\2"
    # Another boot with a wall clock that was set back: nothing is younger than just written.
    machine.boot_id, machine.up_ns = "b2", 7
    assert states_with(3000) == b"\2\2"
    assert states_with(601) == b"\0\0"


def test_blocks_written_after_the_clock_was_set_back_are_newer_than_those_before(tmp_path):
    budget, segment_bytes = budget_for(4, 4, BLOCK)
    machine = Machine()
    make = partial(RealDisk, tmp_path, budget, segment_bytes)
    with make(age_clock_ns=machine.clock()) as disk:
        disk.put(b"k", b"old" * 1000)
    machine.boot_id, machine.wall_ns = "b2", 3
    with make(age_clock_ns=machine.clock()) as disk:
        disk.drain()
        disk.put(b"k", b"new" * 1000)
    with make(age_clock_ns=machine.clock()) as disk:
        disk.drain()
        assert disk.read(b"k") == b"new" * 1000
