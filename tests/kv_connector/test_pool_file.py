"""A pool file belongs to one engine and does not outlive it by more than a start."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kv_connector.pool_file import (
    engine_core_pid,
    pool_name,
    pool_path,
    require_room,
    sweep_dead_pools,
)
from remote_server.errors import ConfigError


def file_of(directory: Path, name: str) -> Path:
    path = directory / pool_path(name).name
    path.write_bytes(b"pool")
    return path


def test_two_engines_with_one_engine_id_have_two_pools():
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert pool_name(os.getpid(), "same") != pool_name(other.pid, "same")
    finally:
        other.communicate(b"\n")


def test_the_pool_of_a_killed_engine_is_swept_and_that_of_a_live_one_is_not(tmp_path: Path):
    engine = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    dying = file_of(tmp_path, pool_name(engine.pid, "an-engine-id"))
    alive = file_of(tmp_path, pool_name(os.getpid(), "an-engine-id"))
    assert sweep_dead_pools(tmp_path) == []
    engine.kill()
    engine.wait()
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


def _report_owner(backend: str, answer: "multiprocessing.Queue[int]") -> None:
    answer.put(engine_core_pid(in_worker=True, executor_backend=backend))


@pytest.mark.parametrize("backend", ["mp", "uni"])
def test_a_worker_finds_the_process_of_its_scheduler(backend: str):
    context = multiprocessing.get_context("spawn")
    answer: multiprocessing.Queue[int] = context.Queue()
    worker = context.Process(target=_report_owner, args=(backend, answer))
    worker.start()
    found = answer.get(timeout=30)
    worker.join(30)
    assert found == (os.getpid() if backend == "mp" else worker.pid)


def test_a_pool_larger_than_dev_shm_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match=r"cpu_pool=\d+ bytes.*shm-size"):
        require_room("kvferry-none", 1 << 60)
