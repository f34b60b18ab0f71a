"""Copies: how fast do rows of the pool become engine blocks, and blocks rows, on a GPU?

    python -m benchmarks.gpu_check.copies --json copies.json
    python -m benchmarks.gpu_check.copies --device cpu --total-mib 8      the path, without a GPU

Rows of five sizes in three layouts, by a call for each page of a block and by the one call that
vLLM makes, beside one large copy of the same bytes, which is as fast as the bus. Every byte of
every copy is compared.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.gpu_check import child
from benchmarks.gpu_check.device import Device
from benchmarks.gpu_check.layouts import LAYOUTS, SHAPES, Cache, Rows, Shape
from benchmarks.gpu_check.mapped_pool import MappedPool
from benchmarks.harness.record import Record, Row
from benchmarks.harness.runner import Case, Runner, Sample, Skipped, WrongBytes
from benchmarks.remote_kv_cache.baseline.copies.device_copies import Pieces

MODULE = "benchmarks.gpu_check.copies"

LOAD, STORE = "load", "store"
WALL = "one large copy"
PAGEABLE = "one large copy, pageable"
ONE_BY_ONE, BATCHED = "a call a page", "one call"

_MIB = 1 << 20
_MOST_PIECES = 1 << 16
_POISON = 0xA5

Key = tuple[str, str]
"""Operation and direction."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run, write, print. Exit status 1 when a row failed."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = child.parser(MODULE, __doc__)
    parser.add_argument(
        "--total-mib", type=child.positive, default=256, metavar="N",
        help="bytes of each copy; fewer where they would be more than 65,536 pages "
        "(default: %(default)s)",
    )  # fmt: skip
    return child.run(MODULE, argv, parser.parse_args(argv), measure)


def measure(device: Device, record: Record, runner: Runner, arguments: argparse.Namespace) -> None:
    """Every shape by itself, all its cases in interleaved rounds. Half of the pool is loaded from
    and the other half is stored to."""
    total = arguments.total_mib * _MIB
    runner.trials, runner.warm_ups = arguments.trials, 1
    with MappedPool(device, 2 * total) as pool:
        pool.populate()
        if device.is_gpu and not pool.lock():
            record.parameters["page-locked"] = f"no: cudaHostRegister returned {pool.lock_error}"
        else:
            record.parameters["page-locked"] = pool.is_pinned() if device.is_gpu else "no GPU"
        for shape in SHAPES:
            try:
                work = Work(device, shape, pool, total)
            except Skipped as reason:
                sample = Sample(skipped=str(reason))
                record.rows.append(Row(str(shape), WALL, 0, sample, LOAD))
                continue
            record.rows += rows_of(work, runner.measure(str(shape), work.cases()))
            child.write(record, arguments)
            if runner.interrupted:
                return


class Work:
    """The rows of one shape in both halves of the pool, and the large copies of the same bytes."""

    def __init__(self, device: Device, shape: Shape, pool: MappedPool, total: int) -> None:
        """Raises `Skipped` where the device has no room for all layouts."""
        most = _MOST_PIECES // shape.num_pieces(LAYOUTS[-1])
        self.shape = shape
        self.num_rows = max(1, min(total // shape.row_bytes, most))
        self.num_bytes = self.num_rows * shape.row_bytes
        free = device.free_bytes()
        if free is not None and (needed := self.num_bytes * (2 * len(LAYOUTS) + 2)) > free * 0.9:
            raise Skipped(f"the GPU has {free // _MIB} MiB free, {needed // _MIB} needed")
        self._device = device
        halves = pool.bytes.reshape(2, -1)[:, : self.num_bytes]
        self.source, self.target = (half.reshape(self.num_rows, -1) for half in halves)
        _fill(self.source)
        draws = np.random.default_rng(0)
        self._blocks, self._rows = (draws.permutation(self.num_rows) for _ in range(2))

    def cases(self) -> list[Case]:
        """Of all layouts, ways and directions, and the bounds."""
        made = [*self._bounds()]
        for layout in LAYOUTS:
            cache = Cache(self._device, layout, self.shape, self._blocks, self._rows)
            made += self._of_layout(layout, cache)
        return made

    def _bounds(self) -> Iterator[Case]:
        torch, name = self._device.torch, self._device.name
        flat = torch.zeros(self.num_bytes, dtype=torch.uint8, device=name)
        expected = torch.from_numpy(self.source.reshape(-1)).to(name)
        ordinary = self.source.copy(), np.empty_like(self.target)
        pools: list[tuple[str, tuple[Rows, Rows]]] = [
            (WALL, (self.source, self.target)), (PAGEABLE, ordinary)
        ]  # fmt: skip
        for operation, (source, target) in pools:
            load = _flat(flat, source)
            yield Case(
                (operation, LOAD), self._copy(load, load=True),
                partial(self._poison_device, flat),
                partial(_check, partial(torch.equal, flat, expected), "the device"),
            )  # fmt: skip
            store = _flat(expected, target)
            yield Case(
                (operation, STORE), self._copy(store, load=False), partial(target.fill, _POISON),
                partial(_check, partial(np.array_equal, target, source), "the rows"),
            )  # fmt: skip

    def _of_layout(self, layout: str, cache: Cache) -> Iterator[Case]:
        expected = cache.expected(self.source)
        loads = cache.pieces(int(self.source.ctypes.data))
        stores = cache.pieces(int(self.target.ctypes.data))
        for way in (ONE_BY_ONE, BATCHED):
            operation = f"{layout}, {way}"
            yield Case(
                (operation, LOAD), self._copy(loads, load=True, way=way),
                partial(cache.poison, _POISON),
                partial(_check, partial(cache.equals, expected), "the device"),
            )  # fmt: skip
            yield Case(
                (operation, STORE), self._copy(stores, load=False, way=way),
                partial(self._before_store, cache, expected),
                partial(_check, partial(np.array_equal, self.target, self.source), "the rows"),
            )  # fmt: skip

    def _before_store(self, cache: Cache, contents: Sequence[Any]) -> None:
        cache.fill(contents)
        self.target.fill(_POISON)

    def _poison_device(self, tensor: Any) -> None:
        tensor.fill_(_POISON)
        self._device.synchronize()

    def _copy(self, pieces: Pieces, *, load: bool, way: str = ONE_BY_ONE) -> Callable[[], None]:
        copies = self._device.copies
        begin = copies.batched if way == BATCHED else copies.one_by_one

        def copy() -> None:
            begin(pieces, load=load)
            copies.wait()

        return copy


def rows_of(work: Work, samples: "dict[Any, Sample]") -> list[Row]:
    """Rows with their ratio to the large copy in the same direction."""
    rows = [
        Row(str(work.shape), operation, work.num_bytes, sample, direction)
        for (operation, direction), sample in samples.items()
    ]
    walls = {row.transport: row.seconds for row in rows if row.operation == WALL}
    for row in rows:
        wall = walls.get(row.transport)
        if wall and row.seconds and row.operation != WALL:
            row.wall, row.ratio_to_wall = WALL, row.seconds / wall
    return rows


def _flat(tensor: Any, rows: npt.NDArray[np.uint8]) -> Pieces:
    numbers = (tensor.data_ptr(), rows.ctypes.data, rows.nbytes)
    return Pieces(*(np.array([number], np.uint64) for number in numbers))


def _check(is_right: Callable[[], bool], where: str) -> None:
    if not is_right():
        raise WrongBytes(f"{where} got other bytes")


def _fill(rows: Rows) -> None:
    """Noise that differs by row and by place."""
    noise = np.random.default_rng(0).integers(0, 256, rows.shape[1] + len(rows), np.uint8)
    for number, row in enumerate(rows):
        row[:] = noise[number : number + len(row)]


if __name__ == "__main__":
    sys.exit(main())
