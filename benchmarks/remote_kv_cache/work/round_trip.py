"""Cases of one client: all blocks put, all blocks got, every byte verified."""

from collections.abc import Callable, Hashable, Mapping
from contextlib import ExitStack
from functools import partial

from benchmarks.harness import machine
from benchmarks.harness.record import Row
from benchmarks.harness.runner import Case, Runner, Sample
from benchmarks.remote_kv_cache.work import blocks, results
from benchmarks.remote_kv_cache.work.blocks import Pool, Work
from benchmarks.remote_kv_cache.work.ferry_client import FerryWork
from benchmarks.remote_kv_cache.work.results import Variant

NAIVE = Variant("b2b naive")


def measure(
    runner: Runner,
    work: Work,
    memory: int | None,
    num_copies: int,
    cases_of: Callable[[ExitStack, Pool, Pool], list[Case]],
) -> list[Row]:
    """A plain copy, and the cases of `cases_of` on the same source and target, whose servers hold
    `num_copies` of the blocks. Raises `Skipped` where memory lacks."""
    return results.rows_of(work, samples(runner, work, memory, num_copies, cases_of), NAIVE)


def samples(
    runner: Runner,
    work: Work,
    memory: int | None,
    num_copies: int,
    cases_of: Callable[[ExitStack, Pool, Pool], list[Case]],
) -> Mapping[Hashable, Sample]:
    """Those of which `measure` makes rows."""
    machine.skip_unless_fits(work.num_bytes * (num_copies + 3), memory)
    source = blocks.allocate(work.num_blocks, work.block_bytes)
    target = blocks.allocate(work.num_blocks, work.block_bytes)
    blocks.fill(source)
    copy = Case(
        NAIVE, partial(blocks.copy_naive, source, target, work), partial(blocks.poison, target),
        partial(blocks.verify, source, target, work.everything),
    )  # fmt: skip
    with ExitStack() as stack:
        return runner.measure(work.model.name, [copy, *cases_of(stack, source, target)])


def cases(
    name: str, transport: str, ferry: FerryWork, work: Work, source: Pool, target: Pool
) -> list[Case]:
    """A put until the blocks are readable, and a streamed get, with checksums. `name` is that of
    the way."""

    def prepare() -> None:
        ferry.make_present(source)
        blocks.poison(target)

    return [
        Case(
            Variant(f"{name}: put", transport, True), partial(ferry.put, source, deferred=False),
            ferry.clear, partial(ferry.verify_kept, source, target),
        ),
        Case(
            Variant(f"{name}: get", transport, True), partial(ferry.get, target), prepare,
            partial(blocks.verify, source, target, work.everything),
        ),
    ]  # fmt: skip
