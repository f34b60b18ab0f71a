"""Bucket: how near is the bucket tier to bare calls of the object store, and what CPU does it take?

Bare calls of obstore, the bucket tier alone, and servers move objects of the same size from and to
the same memory, with as many calls at a time, in turns. `put` ends when the store has all objects.
Every get is cold: a new tier, or a new server, that knows the headers and no bodies.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from benchmarks.harness import machine, options, table
from benchmarks.harness.plot import Chart
from benchmarks.harness.record import Figure, Record, Row
from benchmarks.harness.runner import Case, Runner, Sample, Skipped
from benchmarks.harness.summary import summarize
from benchmarks.remote_kv_cache.baseline.bucket.bare_calls import Bare
from benchmarks.remote_kv_cache.baseline.bucket.bucket_tier import Tier
from benchmarks.remote_kv_cache.baseline.bucket.packs import Load, Way
from benchmarks.remote_kv_cache.baseline.bucket.servers import ThroughServers
from benchmarks.remote_kv_cache.work import object_stores, results
from benchmarks.remote_kv_cache.work.object_stores import Store
from benchmarks.remote_kv_cache.work.results import Variant
from remote_server.allocator import keep_freed_memory
from remote_server.errors import ConfigError
from remote_server.store.bucket.opening import NUM_THREADS
from remote_server.values import GiB, MiB, format_bytes

MODULE = "benchmarks.remote_kv_cache.baseline.test_bucket_speed"

BARE, TIER, SERVERS = "bare calls", "bucket tier", "through servers"
WAYS = (BARE, TIER, SERVERS)
PUT, GET = "put", "get"


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(argv)
    keep_freed_memory()  # as a server does
    record = Record.begin(MODULE, argv)
    try:
        machine.skip_unless_fits(5 * arguments.total, arguments.memory)
        load = Load(arguments.total, arguments.row, arguments.pack)
    except (ConfigError, Skipped) as error:
        print(f"{MODULE}: {error}", file=sys.stderr)
        return 2
    record.parameters |= {
        "objects": load.num_packs, "object_bytes": load.objects.shape[1],
        "rows of an object": load.rows_per_pack, "calls at a time": arguments.threads,
    }  # fmt: skip
    with Runner(arguments.trials, arguments.warm_ups) as runner:
        for name in arguments.stores:
            try:
                with object_stores.opened(name, arguments.directory) as store:
                    record.parameters[store.name] = store.description
                    measure(runner, record, arguments, store, load)
            except Skipped as reason:
                record.rows.append(Row(name, BARE, load.num_bytes, Sample(skipped=str(reason))))
            if runner.interrupted:
                break
    options.write(record, runner, arguments, chart)
    show(record, arguments, load)
    return options.finish(record, runner)


def chart(record: Record) -> Chart:
    """Each way to each store."""
    return results.chart(_charted(record), record)


def _parser() -> argparse.ArgumentParser:
    parser = options.parser(MODULE, "how fast packs get to an object store and back")
    parser.add_argument(
        "--stores", type=options.several(str), metavar="STORES",
        default=[object_stores.TMPFS, object_stores.DISK, object_stores.EMULATOR],
        help=f"of {', '.join(object_stores.NAMES)} (of S3, moto) and addresses as s3://bucket or "
        "az://container, with that store's variables in the environment (default: all of these)",
    )  # fmt: skip
    parser.add_argument(
        "--ways", type=options.names(("bare", "tier", "servers")), metavar="WAYS",
        default=["bare", "tier", "servers"], help="(default: bare,tier,servers)",
    )  # fmt: skip
    parser.add_argument(
        "--total", type=options.size, default=128 * MiB, metavar="SIZE",
        help="bytes of rows of a round (default: 128MiB)",
    )  # fmt: skip
    parser.add_argument(
        "--row", type=options.size, default=2 * MiB, metavar="SIZE", help="(default: 2MiB)"
    )
    parser.add_argument(
        "--pack", type=options.size, default=16 * MiB, metavar="SIZE",
        help="bytes of rows of an object (default: 16MiB)",
    )  # fmt: skip
    parser.add_argument(
        "--threads", type=options.positive, default=NUM_THREADS, metavar="N",
        help="calls at a time; a server's are always the default (default: %(default)s)",
    )  # fmt: skip
    options.add_directory(parser)
    return parser


class CpuTime:
    """A timed call, and the CPU seconds of each of its trials."""

    def __init__(self, way: Way, call: Callable[[], object]) -> None:
        self._way, self._call = way, call
        self.seconds: list[float] = []

    def __call__(self) -> None:
        before = self._way.cpu_s()
        self._call()
        self.seconds.append(self._way.cpu_s() - before)


def measure(
    runner: Runner, record: Record, arguments: argparse.Namespace, store: Store, load: Load
) -> None:
    """All ways to `store`, in turns, into `record`."""
    with ExitStack() as stack:
        ways: dict[str, Way] = {}
        for name in arguments.ways:
            ways[_LABELS[name]] = way = _way(name, store, load, arguments.threads)
            stack.callback(way.close)
        cases: list[Case] = []
        cpu: dict[Variant, CpuTime] = {}
        for label, way in ways.items():
            way.clear()
            way.write()  # a round may begin at a get
            put, get = CpuTime(way, way.write), CpuTime(way, way.read)
            cpu |= {Variant(f"{label}: {PUT}"): put, Variant(f"{label}: {GET}"): get}
            cases += [
                Case(Variant(f"{label}: {PUT}"), put, way.clear),
                Case(Variant(f"{label}: {GET}"), get, way.make_cold, way.verify),
            ]
        samples = runner.measure(store.name, cases)
    rows = {
        variant: Row(store.name, variant.operation, load.num_bytes, samples[variant])
        for variant in cpu
    }
    for variant, row in rows.items():
        wall = Variant(f"{BARE}: {row.operation.rpartition(' ')[2]}")
        if wall in rows and wall != variant:
            bare = rows[wall].seconds
            row.wall = wall.operation
            row.ratio_to_wall = row.seconds / bare if row.seconds and bare else None
        used = [seconds / (load.num_bytes / GiB) for seconds in
                samples[variant].timed(cpu[variant].seconds)]  # fmt: skip
        if used:
            one = summarize(used)
            record.figures.append(
                Figure(f"{store.name}: {row.operation}", "CPU s/GiB",
                       {"cpu": one.median, "min": one.min, "max": one.max})
            )  # fmt: skip
    record.rows += rows.values()


_LABELS = dict(zip(("bare", "tier", "servers"), WAYS, strict=True))


def _way(name: str, store: Store, load: Load, threads: int) -> Way:
    if name == "bare":
        return Bare(store, load, threads)
    if name == "tier":
        return Tier(store, load, threads)
    return ThroughServers(store, load)


def _charted(record: Record) -> list[Variant]:
    return [Variant(name) for name in dict.fromkeys(row.operation for row in record.rows)]


def show(record: Record, arguments: argparse.Namespace, load: Load) -> None:
    """Print each way's speed and its part of the bare calls', and the CPU time beside it."""
    cpu = {figure.name: figure.values["cpu"] for figure in record.figures}
    lines: list[list[table.Cell]] = []
    for row in record.rows:
        if row.reason:
            lines.append([row.model, row.operation, None, None, None, None, row.reason])
            continue
        spread = f"{summarize(row.sample.values).spread * 100:.0f}%"
        part = f"{100 / row.ratio_to_wall:.0f}%" if row.ratio_to_wall else ""
        used = cpu.get(f"{row.model}: {row.operation}")
        lines.append([row.model, row.operation, row.gb_per_s, spread, part, used, ""])
    print(f"{load.num_packs} objects of {format_bytes(load.pack_bytes)} a round, "
          f"{arguments.threads} at a time; medians of {arguments.trials} trials")  # fmt: skip
    print(table.render(["store", "", "GB/s", "spread", "of bare", "CPU s/GiB", ""], lines))


if __name__ == "__main__":
    sys.exit(main())
