"""Cases of one client: all blocks put, all blocks got, every byte verified."""

from functools import partial

from benchmarks.harness.runner import Case
from benchmarks.remote_kv_cache.baseline import blocks
from benchmarks.remote_kv_cache.baseline.blocks import Pool, Work
from benchmarks.remote_kv_cache.baseline.ferry_client import FerryWork
from benchmarks.remote_kv_cache.baseline.results import Variant


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
