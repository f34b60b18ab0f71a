"""Systems that keep blocks, side by side: how fast are blocks written, read again, and read cold?

    python -m benchmarks.six_systems --block-bytes 1MiB --total 256MiB
    python -m benchmarks.six_systems --total 1GB                             the source's amount
    python -m benchmarks.six_systems --total 2GiB --processes 2              all together, at once
    python -m benchmarks.six_systems --hosts a,b --address c --json r.json   by ssh, all at once
    python -m benchmarks.six_systems --json r.json --resume                  after Ctrl-C
    python -m benchmarks.six_systems --systems redis memcached "kvferry, tcp"

Every row is the software that it names. Software that is not installed is SKIPPED with the reason;
`make peers` installs all that this machine can run.
"""

import argparse
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import machine, options, plot, table, titles
from benchmarks.harness.commands import peer_folder
from benchmarks.harness.journal import Journal
from benchmarks.harness.record import Figure, Record, Row
from benchmarks.harness.runner import Case, Runner, Sample, Skipped, nothing
from benchmarks.six_systems import catalogue, flags, latency, shared_prefix
from benchmarks.six_systems.catalogue import SYSTEMS, Entry
from benchmarks.six_systems.clients import Clients, Step, alone, crowd, own_rows
from benchmarks.six_systems.hosts import over_hosts
from benchmarks.six_systems.hosts.nodes import Plan
from benchmarks.six_systems.systems import Share, Sizes
from remote_server.allocator import keep_freed_memory
from remote_server.errors import ConfigError
from remote_server.values import format_bytes

MODULE = "benchmarks.six_systems"

WRITE, HOT, COLD = "write", "hot read", "cold read"
_STEPS: dict[str, tuple[Step, Step, Step]] = {
    WRITE: ("before_write", "write", "verify_write"),
    HOT: ("before_hot_read", "read", "verify"),
    COLD: ("before_cold_read", "read", "verify"),
}
_SHARED = "shared prefix:"
_ROWS = 2.0
"""Copies of the bytes in addition to a system's own: source and target."""


class Key(NamedTuple):
    system: str
    operation: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = flags.parser(MODULE)
    arguments = parser.parse_args(argv)
    options.check_resume(parser, arguments)
    try:
        plan = flags.plan_of(arguments)
    except ConfigError as error:
        parser.error(str(error))
    if arguments.print_launch:
        if plan is None:
            parser.error("--print-launch: only with --hosts")
        if not plan.port:
            parser.error("--print-launch: the lines name a port; add --port, as in --port 7171")
        print("\n".join(shlex.join(words) for words in plan.words(plan.port)))
        return 0
    keep_freed_memory()
    record = Record.begin(MODULE, argv)
    record.versions |= peer_folder.versions(*catalogue.PEERS)
    for name, program in (("redis-server", "redis"), ("memcached", "memcached")):
        try:
            record.versions[name] = _version(name, program)
        except Skipped as reason:
            record.parameters[name] = str(reason)
    journal = Journal.open(record, arguments.json, resume=arguments.resume)
    with Runner(arguments.trials, arguments.warm_ups, journal=journal) as runner:
        if plan is None:
            measure(runner, record, arguments)
        else:
            _over_hosts(runner, record, arguments, plan)
            record.command = plan.without_names(record.command)
        record.figures += _across_processes(record)
        if not runner.interrupted and arguments.shared_prefix:
            record.figures.append(_shared_prefix(arguments.prefix_block_bytes, runner.journal))
    journal.end(complete=not runner.interrupted and not runner.num_failed)
    options.write(record, runner, arguments, chart)
    show(record, arguments)
    return options.finish(record, runner)


def _over_hosts(runner: Runner, record: Record, arguments: argparse.Namespace, plan: Plan) -> None:
    processes = arguments.processes
    hosts, block_bytes = len(plan.hosts), arguments.block_bytes
    share = max(1, arguments.total // block_bytes // (processes * hosts))
    title = f"{hosts} hosts, {processes} processes each, {share} x {format_bytes(block_bytes)} each"
    chosen = _chosen(arguments)
    amount = over_hosts.Amount(block_bytes, share, processes)
    over_hosts.measure(runner, record, title, chosen, amount, plan, _STEPS, arguments.latency)


def _chosen(arguments: argparse.Namespace) -> list[Entry]:
    return [entry for entry in SYSTEMS if any(entry in some for some in arguments.systems)]


def measure(runner: Runner, record: Record, arguments: argparse.Namespace) -> None:
    """Measure every system into `record`: interleaved if the copies of all fit into memory
    together, else in sequence. Systems that spin on a core are measured alone."""
    processes, block_bytes = arguments.processes, arguments.block_bytes
    share = max(1, arguments.total // block_bytes // processes)
    num_blocks = share * processes
    title = f"{num_blocks} x {format_bytes(block_bytes)}"
    if processes > 1:
        title = f"{processes} processes, {share} x {format_bytes(block_bytes)} each"
    groups = _groups(arguments, num_blocks * block_bytes)
    record.parameters["measured together"] = [[entry.name for entry in some] for some in groups]
    with ExitStack() as stack:
        base = Path(stack.enter_context(
            tempfile.TemporaryDirectory(prefix="kvferry-six-", dir=arguments.directory.resolve())
        ))  # fmt: skip
        for number, group in enumerate(groups):
            if not runner.interrupted:
                sizes = Sizes(block_bytes, num_blocks, base / f"{number}")
                _measure_group(runner, record, title, group, sizes, arguments)
        for number, entry in enumerate(_chosen(arguments) if arguments.latency else ()):
            if not runner.interrupted:
                folder = base / f"latency-{number}"
                folder.mkdir()
                one = partial(
                    latency.measure, entry, Sizes(block_bytes, 1, folder), arguments.latency
                )
                latency.into(record, runner, entry.name, block_bytes, one)


def _groups(arguments: argparse.Namespace, num_bytes: int) -> list[list[Entry]]:
    """The groups of systems that are measured together, in interleaved rounds."""
    everything = _chosen(arguments)
    together = [entry for entry in everything if not entry.apart]
    copies = _ROWS + sum(entry.copies for entry in together)
    try:
        machine.skip_unless_fits(int(copies * num_bytes), arguments.memory)
    except Skipped:
        together = []
    if arguments.processes > 1:
        together = []
    rest = [[entry] for entry in everything if entry not in together]
    return [together, *rest] if together else rest


def _measure_group(
    runner: Runner, record: Record, title: str, group: Sequence[Entry], sizes: Sizes,
    arguments: argparse.Namespace,
) -> None:  # fmt: skip
    copies = _ROWS + sum(entry.copies for entry in group)
    try:
        machine.skip_unless_fits(int(copies * sizes.num_bytes), arguments.memory)
    except Skipped as reason:
        skipped = Sample(skipped=str(reason))
        record.rows += [Row(title, operation, sizes.num_bytes, skipped, entry.name)
                        for entry in group for operation in _STEPS]  # fmt: skip
        return
    runner.show(f"{title}: starting {', '.join(entry.name for entry in group)}")
    with ExitStack() as stack:
        share: Share | None = None
        if arguments.processes == 1:
            share = stack.enter_context(own_rows(sizes.num_blocks, sizes.block_bytes, sizes.folder))
        cases: list[Case] = []
        for number, entry in enumerate(group):
            own = sizes._replace(folder=sizes.folder / f"{number}")
            own.folder.mkdir(parents=True)
            cases += _cases(stack, entry, own, share, arguments.processes, runner, title)
        samples = runner.measure(title, cases)
    for key, sample in samples.items():
        assert isinstance(key, Key)
        record.rows.append(Row(title, key.operation, sizes.num_bytes, sample, key.system))


def _cases(
    stack: ExitStack,
    entry: Entry,
    sizes: Sizes,
    share: Share | None,
    num_processes: int,
    runner: Runner,
    title: str,
) -> list[Case]:
    """The three cases of one system, which runs until `stack` ends. It does not run when the
    journal has all of them."""
    keys = [Key(entry.name, operation) for operation in _STEPS]
    if all(runner.is_measured(title, key) for key in keys):
        return [Case(key, nothing) for key in keys]
    try:
        with ExitStack() as own:
            host = own.enter_context(entry.serve(sizes))
            clients: Clients
            if share is not None:
                share = share._replace(folder=sizes.folder)
                clients = own.enter_context(alone(entry, host, share))
            else:
                clients = own.enter_context(crowd(entry, host, sizes, num_processes))
            stack.enter_context(own.pop_all())
    except Skipped as reason:
        return [Case.skipped(key, reason) for key in keys]
    except Exception as error:  # any error of foreign software: only its rows fail
        return [Case(key, partial(_fail, f"{type(error).__name__}: {error}")) for key in keys]
    return [
        Case(key, partial(clients.do, run), partial(clients.do, before), partial(clients.do, after))
        for key, (before, run, after) in zip(keys, _STEPS.values(), strict=True)
    ]


def _fail(why: str) -> None:
    raise RuntimeError(why)


def _version(name: str, peer: str) -> str:
    return peer_folder.version(peer_folder.program(peer, name))


def _shared_prefix(block_bytes: int, journal: Journal) -> Figure:
    if (found := journal.get(_SHARED)) is None:
        found = shared_prefix.measure(block_bytes)._asdict()
        journal.put((_SHARED,), found)
    return Figure(
        f"{_SHARED} {shared_prefix.SESSIONS} sessions of {shared_prefix.COMMON_BLOCKS} common and "
        f"{shared_prefix.OWN_BLOCKS} own blocks",
        "blocks and bytes, as the server counts them",
        {name: float(value) for name, value in found.items()},
        "tcp",
    )


def show(record: Record, arguments: argparse.Namespace) -> None:
    """Print GB/s of each system or the reason for none, versions, and the savings by sharing."""
    found = {(row.transport, row.operation): row for row in record.rows}
    lines: list[list[table.Cell]] = []
    for name in dict.fromkeys(row.transport for row in record.rows):
        rows = [found.get((name, operation)) for operation in (WRITE, HOT, COLD)]
        reasons = dict.fromkeys(row.reason for row in rows if row and row.reason)
        late = [latency.of(record, name or "", each) for each in (WRITE, HOT)]
        speeds = [row.gb_per_s if row else None for row in rows]
        lines.append([name, *speeds, *late, "; ".join(reasons)])
    together = f", of {arguments.processes} processes together" if arguments.processes > 1 else ""
    if arguments.hosts:
        together = f", of {len(arguments.hosts)} hosts x {arguments.processes} processes together"
    print(
        f"GB/s, medians of {arguments.trials} trials of {format_bytes(arguments.total)}{together}"
    )
    times = [f"{each} p50, p99 ms" for each in (WRITE, HOT)]
    print(table.render(["system", WRITE, HOT, COLD, *times, ""], lines))
    print(", ".join(f"{name} {version}" for name, version in record.versions.items()))
    for figure in record.figures:
        values = figure.values
        if figure.name.startswith(_SHARED):
            print(
                f"\n{figure.name}: {values['existed']:.0f} of {values['put']:.0f} blocks were "
                f"there already; {format_bytes(int(values['logical_bytes']))} were put, and "
                f"{format_bytes(int(values['physical_bytes']))} are stored"
            )
        elif latency.ONE_BLOCK not in figure.name:
            where = f"{figure.transport}: " if over_hosts.PER_HOST in figure.name else ""
            print(f"{where}{figure.name}: {', '.join(f'{n} {v:.3g}' for n, v in values.items())}")


def _across_processes(record: Record) -> Iterator[Figure]:
    """The systems with a process of their own, the fastest first. All others here do not move the
    bytes to a process: one copy, no message, and no check."""
    processes = {entry.name for entry in SYSTEMS if entry.is_process}
    for operation in (WRITE, HOT):
        rows = [row for row in record.rows if row.operation == operation and row.gb_per_s]
        speeds = {row.transport: row.gb_per_s for row in rows if row.transport in processes}
        ordered = sorted(speeds.items(), key=lambda one: -(one[1] or 0.0))
        if ordered:
            values = {name or "": speed or 0.0 for name, speed in ordered}
            yield Figure(f"{operation}, from process to process", "GB/s, fastest first", values)


def chart(record: Record) -> plot.Chart:
    """GB/s: a group for each system that was measured, a bar for each operation."""
    measured = (row.transport for row in record.rows if row.gb_per_s)
    names = [name or "" for name in dict.fromkeys(measured)]
    found = {(row.transport, row.operation): row.gb_per_s for row in record.rows}
    series = {
        operation: [found.get((name, operation)) for name in names]
        for operation in (WRITE, HOT, COLD)
    }
    return plot.bars(titles.of(record, "six systems"), "GB/s", names, series)


if __name__ == "__main__":
    sys.exit(main())
