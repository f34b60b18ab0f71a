"""A pool file belongs to one engine and does not outlive it by more than a start."""

import errno
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pool_owner import report_owner_from_a_child
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from kv_connector.pool.pool_file import (
    check_pool_is_there,
    offer_sealed_file,
    pool_name,
    pool_path,
    sweep_dead_pools,
)
from remote_server.errors import ConfigError

pytestmark = pytest.mark.real_time


def file_of(directory: Path, name: str) -> Path:
    path = directory / pool_path(name).name
    path.write_bytes(b"pool")
    return path


def test_the_pool_of_a_killed_engine_is_swept_and_that_of_a_live_one_is_not(tmp_path: Path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as engine:
        dying = file_of(tmp_path, pool_name(engine.pid, "an-engine-id"))
        alive = file_of(tmp_path, pool_name(os.getpid(), "an-engine-id"))
        assert sweep_dead_pools(tmp_path) == []
        engine.kill()
    assert sweep_dead_pools(tmp_path) == [dying]
    assert alive.exists()


def test_a_reused_process_id_does_not_protect_a_dead_pool(tmp_path: Path):
    namespace = os.stat("/proc/self/ns/pid").st_ino
    dead = file_of(tmp_path, f"kvferry-{namespace}-{os.getpid()}-1-engine")
    assert sweep_dead_pools(tmp_path) == [dead]


@pytest.mark.parametrize(
    "name",
    [
        "vllm_offload_another.mmap",
        "vllm_offload_kvferry-x.mmap",
        "vllm_offload_kvferry-1-2-3-e.mmap",
    ],
)
def test_files_that_are_not_ours_to_judge_stay(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(b"")
    assert sweep_dead_pools(tmp_path) == []


def test_a_worker_that_another_process_started_looks_for_another_pool():
    """As under an executor that starts its workers elsewhere. A worker takes its parent for the
    engine core, so the scheduler finds no pool of theirs, and does not start."""
    context = multiprocessing.get_context("spawn")
    answer: multiprocessing.Queue[int] = context.Queue()
    launcher = context.Process(target=report_owner_from_a_child, args=("mp", answer))
    launcher.start()
    found = answer.get(timeout=100)
    launcher.join(30)
    assert found == launcher.pid
    assert pool_name(found, "same") != pool_name(os.getpid(), "same")


def test_a_pool_larger_than_the_machine_is_refused_by_its_setting():
    with pytest.raises(ConfigError, match=r"cpu_pool: .* requested, but only .* is available"):
        offer_sealed_file("kvferry-none", 1 << 60)
    assert not pool_path("kvferry-none").exists()


@pytest.fixture
def region_name() -> Iterator[str]:
    name = pool_name(os.getpid(), "a-test")
    yield name
    pool_path(name).unlink(missing_ok=True)


def test_vllms_region_lies_in_a_file_that_cannot_shrink(region_name: str):
    """Both sides map what the first one made; the name may go, and no process can truncate it."""
    made = offer_sealed_file(region_name, 16 * 4096)
    assert made is not None
    assert offer_sealed_file(region_name, 16 * 4096) is None, "the second one finds it"
    sides = [SharedOffloadRegion(region_name, 16, rank, 4096, 4096) for rank in (0, None)]
    pool_path(region_name).unlink()
    sides[0].base_tensor[5] = 42
    assert sides[1].base_tensor[5] == 42
    with pytest.raises(PermissionError):
        os.ftruncate(sides[1].fd, 4096)
    for side in sides:
        side.cleanup()
    os.close(made)


def test_a_name_whose_file_died_with_its_engine_is_swept(tmp_path: Path):
    namespace = os.stat("/proc/self/ns/pid").st_ino
    name = tmp_path / pool_path(f"kvferry-{namespace}-4194303-1-engine").name
    name.symlink_to("/proc/4194303/fd/7")
    assert sweep_dead_pools(tmp_path) == [name]
    assert not os.path.lexists(name)


def test_a_dead_pool_that_belongs_to_another_user_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """/dev/shm is sticky: its file cannot be removed by us, and our engine starts all the same."""
    namespace = os.stat("/proc/self/ns/pid").st_ino
    for pid in (4194301, 4194302):
        file_of(tmp_path, f"kvferry-{namespace}-{pid}-1-engine")
    unlink = Path.unlink

    def sticky(path: Path, missing_ok: bool = False) -> None:
        if "4194301" in path.name:
            raise PermissionError(path)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", sticky)
    (removed,) = sweep_dead_pools(tmp_path)
    assert "4194302" in removed.name


def test_a_name_whose_maker_has_died_is_refused_and_not_removed(region_name: str):
    """Another worker may be about to use it: what is removed by one is mapped by another."""
    pool_path(region_name).symlink_to("/proc/4194303/fd/7")
    with pytest.raises(ConfigError, match="has died; remove that file"):
        offer_sealed_file(region_name, 4096)
    assert os.path.lexists(pool_path(region_name))


@pytest.mark.parametrize("others", [False, True], ids=["own", "another user's"])
def test_a_pool_of_a_process_that_proc_hides_is_refused_with_the_cure(
    region_name: str, monkeypatch: pytest.MonkeyPatch, others: bool
):
    """With hidepid=2 and hidepid=4 /proc has no folder of it, as if it had died."""
    maker = os.getpid()

    def signal(pid: int, number: int) -> None:
        assert (pid, number) == (maker, 0)
        if others:
            raise PermissionError(errno.EPERM, "Operation not permitted")

    exists = Path.exists
    hidden = Path(f"/proc/{maker}")
    monkeypatch.setattr(Path, "exists", lambda path: path != hidden and exists(path))
    monkeypatch.setattr(os, "kill", signal)
    pool_path(region_name).symlink_to(hidden / "fd" / "1000000")
    with pytest.raises(ConfigError, match=r"hidden in /proc.*one user.*hidepid"):
        check_pool_is_there(region_name, 4096)


def test_a_pool_of_a_process_that_is_closed_to_this_one_is_refused_with_the_cure(
    region_name: str, monkeypatch: pytest.MonkeyPatch
):
    """As with another user, or with a process that is not dumpable. Root may open it all the same,
    so the refusal is that of `stat`."""

    def refuse(path: Path, **_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(ConfigError, match=r"one user.*hidepid"):
        check_pool_is_there(region_name, 4096)
