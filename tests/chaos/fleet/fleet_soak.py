"""A thousand fake engines on four servers, for minutes: does anything grow?

    make fleet-soak MINUTES=10

Each engine is connected to each server, and lookups of whole prompts go on all the time. Every
second some engines leave without a word, and others come. A line at the end has the memory and the
files of an engine on a server, the time of lookups, and the growth of the servers. Exit status: 0
all was right, 1 something was not.

The servers' memory is filled when it is allocated. Otherwise their resident memory grows for longer
than a soak lasts though they allocate nothing: libzmq allocates 16 KiB for the next 256 frames of a
connection, in each direction, and only what was used of it is resident. A connection allocates 32
KiB more after its first 256 frames, once. Here it ends before that, unless `--churn` is small and
`--lookups` large: then that counts as growth.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from chaos_server import open_files, resident_bytes
from crew import medians, no_more_than, steady
from fleet_client import FleetClient
from fleet_crowd import NUM_PROMPTS, Crowd
from fleet_load import FleetLoad
from fleet_servers import FleetServers
from owned_process import OwnedProcess

NUM_ENGINES = 1_000
KiB, MiB = 1 << 10, 1 << 20

FILLED = {"GLIBC_TUNABLES": "glibc.malloc.perturb=85"}
"""In the environment of a process: the memory that it allocates is resident at once."""

MOST_BYTES = 112 * KiB
"""Of a server's memory for each engine that is connected. Without `FILLED` 38 KiB of them are
resident at first, and 92 KiB after 512 frames in each direction."""

MOST_FILES_BESIDE = 8
"""Of a server, besides one for each connection."""

MOST_GROWTH = 0.02
"""Of a server's resident memory, between the second quarter of a soak and the last."""

MOST_MORE_FILES = 0.01
"""The same for its open files: engines come and go."""

P99_MS = 250.0
"""Of lookups at all four servers, beside other work on two cores."""


class Load(NamedTuple):
    parts: int
    """Samples of the servers are taken between two of them."""

    part_s: float
    lookups_a_second: float
    engines_replaced_a_second: float


class Result(NamedTuple):
    """Of servers, the most of any."""

    seconds: float
    bytes_each: float
    files: int
    asked: int
    complete: int
    """Lookups that found every row, on one of its homes or both."""

    p50_ms: float
    p99_ms: float
    longest_ms: float
    replaced: int
    growth: float
    more_files: float

    def __str__(self) -> str:
        return (
            f"{NUM_ENGINES:,} engines: {self.bytes_each / KiB:.1f} KiB of a server each, "
            f"{self.files:,} files of a server; {self.asked:,} lookups in {self.seconds:.0f} s, "
            f"p50 {self.p50_ms:.1f} ms, p99 {self.p99_ms:.1f} ms, longest {self.longest_ms:.0f} "
            f"ms; {self.replaced:,} engines replaced; servers grew by {self.growth:+.2%}, their "
            f"files by {self.more_files:+.2%}"
        )

    def check(self) -> None:
        """AssertionError for what is beyond its limit."""
        assert self.complete == self.asked, f"{self.asked - self.complete} lookups had no answer"
        assert self.p99_ms < P99_MS, self
        assert self.bytes_each < MOST_BYTES, self
        assert self.files <= NUM_ENGINES + MOST_FILES_BESIDE, self
        assert self.growth <= MOST_GROWTH, self
        assert self.more_files <= MOST_MORE_FILES, self


def soak(folder: Path, load: Load, watch: Callable[[str], None] = lambda _: None) -> Result:
    """AssertionError when a server keeps anything of engines that left. `watch` receives a line
    after each part."""
    args = ["--max-connections", str(NUM_ENGINES + 100)]
    with FleetServers(folder, disk=False, args=args, env=FILLED) as servers:
        with FleetClient(servers.addresses()) as client:
            client.wait_until_complete()
            prompts = FleetLoad([client], range(NUM_PROMPTS), 0)
            prompts.sweep()
            assert prompts.sweep() == 1.0
        servers.check_nothing_is_held()
        unused = [steady(one.held) for one in servers.all]
        pids = [one.server.pid for one in servers.all]
        before = [*map(resident_bytes, pids)]
        endpoints = {one.name: one.server.endpoint for one in servers.all}
        with OwnedProcess(Crowd, NUM_ENGINES, endpoints) as crowd:
            crowd.go(2.0, *load[2:])
            bytes_each = max(
                (resident_bytes(pid) - had) / NUM_ENGINES
                for pid, had in zip(pids, before, strict=True)
            )
            files = max(open_files(pid) - one.files for pid, one in zip(pids, unused, strict=True))
            parts = []
            resident, opened = [[*map(resident_bytes, pids)]], [[*map(open_files, pids)]]
            for _ in range(load.parts):
                parts.append(crowd.go(*load[1:]))
                resident.append([*map(resident_bytes, pids)])
                opened.append([*map(open_files, pids)])
                mib = " ".join(f"{one / MiB:7.2f}" for one in resident[-1])
                watch(
                    f"{len(parts) * load.part_s:7.0f} s  MiB {mib}  p99 {parts[-1]['p99']:.1f} ms"
                )
        for one, most in zip(servers.all, unused, strict=True):
            no_more_than(most, one.held, one.name)
        servers.check_nothing_is_held()
    return Result(
        seconds=load.parts * load.part_s,
        bytes_each=bytes_each,
        files=files,
        asked=sum(int(part["asked"]) for part in parts),
        complete=sum(int(part.get("complete", 0)) for part in parts),
        p50_ms=statistics.median(part["p50"] for part in parts),
        p99_ms=statistics.median(part["p99"] for part in parts),
        longest_ms=max(part["longest"] for part in parts),
        replaced=sum(int(part["replaced"]) for part in parts),
        growth=max(map(grown, zip(*resident, strict=True))),
        more_files=max(map(grown, zip(*opened, strict=True))),
    )


def grown(values: Sequence[int]) -> float:
    """The growth between the median of the second quarter and that of the last."""
    before, after = medians(values)
    return after / before - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--lookups", type=float, default=150.0, help="a second, of all engines")
    parser.add_argument("--churn", type=float, default=10.0, help="engines replaced a second")
    flags = parser.parse_args()
    if flags.lookups <= 0 or flags.churn < 0:
        parser.error("--lookups must be above 0, and --churn must not be negative")
    with tempfile.TemporaryDirectory(prefix="kvferry-chaos-") as folder:
        load = Load(max(8, int(flags.minutes * 12)), 5.0, flags.lookups, flags.churn)
        result = soak(Path(folder), load, watch=partial(print, flush=True))
    print(result)
    try:
        result.check()
    except AssertionError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
