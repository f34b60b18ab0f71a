"""The GPU of a machine, by CUDA's driver alone: its number, name and version."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.harness import machine
from benchmarks.harness.record import Record


class Driver:
    """`libcuda`, as ctypes shows it: results are written behind pointers."""

    def __init__(self, gpus: int = 2, error: int = 0) -> None:
        def answer(place: Any, value: int, result: int = 0) -> int:
            place._obj.value = value
            return result

        def name_of(name: Any, size: int, device: ctypes.c_int) -> int:
            assert (size, device.value) == (256, 7)
            name.value = b"A large GPU"
            return error

        self.cuInit = lambda flags: error
        self.cuDeviceGetCount = lambda count: answer(count, gpus)
        self.cuDeviceGet = lambda device, number: answer(device, 7 + number)
        self.cuDeviceGetName = name_of
        self.cuDriverGetVersion = lambda version: answer(version, 13010, error)


def libraries(driver: Driver | None) -> Callable[[str], Driver]:
    def load(name: str) -> Driver:
        assert name == "libcuda.so.1"
        if driver is None:
            raise OSError("libcuda.so.1: cannot open shared object file")
        return driver

    return load


@pytest.mark.parametrize(
    ("driver", "number", "name", "version"),
    [
        (Driver(), 2, "A large GPU", "13.1"),
        (Driver(gpus=0), 0, None, "13.1"),
        (Driver(error=100), 0, None, None),
        (None, 0, None, None),
    ],
)
def test_what_the_driver_answers(monkeypatch: pytest.MonkeyPatch, driver, number, name, version):
    monkeypatch.setattr(ctypes, "CDLL", libraries(driver))
    assert (machine.num_gpus(), machine.gpu_name()) == (number, name)
    assert machine.cuda_version() == version
    described = machine.describe_with_gpu()
    assert described.get("gpu") == name and described.keys() <= {"cores", "memory_gib", "gpu"}
    record = Record("b", "c", machine=described)
    assert record.describe_machine().endswith(f"GiB, {name}" if name else "GiB")
