"""Servers that fault in no memory, and one short run of the storage workload, for all who look at
what it leaves behind."""

import contextlib
import io
from collections.abc import Iterator
from functools import partial

import pytest
from workload_files import WorkloadRun

from benchmarks.storage_workload import __main__ as storage_workload
from benchmarks.storage_workload.backends import wire
from benchmarks.storage_workload.backends.payload import Payload
from benchmarks.storage_workload.runs import run, stores


@pytest.fixture(scope="session", autouse=True)
def _little_is_filled() -> Iterator[None]:
    """Benchmarks give a server a GiB at least; to fault it in takes 0.6 s of CPU time. The storage
    workload cuts its blocks from 64 MiB of noise, and touches the windows of its client."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVFERRY_POPULATE", "false")
        patch.setattr(stores, "Payload", partial(Payload, noise_bytes=1 << 20))
        patch.setattr(wire, "WINDOW_BYTES", 4 << 20)
        yield


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """torch's threads wait for each other in a loop, which costs most where the host is busy."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def workload_run(tmp_path_factory: pytest.TempPathFactory) -> WorkloadRun:
    """More than the memory tier holds, with documents: every tier and every purpose comes."""
    folder = tmp_path_factory.mktemp("workload")
    to = WorkloadRun(folder, 0, "")
    arguments = [
        "--model", "tiny-1b", "--num-users", "6", "--max-requests", "8",
        "--generation-mode", "none", "--gpu-mem-gb", "0", "--cpu-mem-gb", "0.01",
        "--storage-capacity-gb", "0.2", "--duration", "600", "--block-tokens", "64",
        "--bytes-scale", "0.05", "--think-scale", "0.02", "--seed", "42",
        "--enable-rag", "--rag-num-docs", "2", "--cache-dir", str(folder),
        "--output", str(to.json), "--html", str(to.html),
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(run, "HEADROOM_S", 0.1)
        status = storage_workload.main(arguments)
    return to._replace(status=status, printed=out.getvalue())
