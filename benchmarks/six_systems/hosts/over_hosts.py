"""A run over several hosts: each has clients and servers of its own; all take each step at once."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from benchmarks.harness.record import Figure, Record, Row
from benchmarks.harness.runner import Case, Runner, Sample, Skipped
from benchmarks.harness.summary import summarize
from benchmarks.six_systems import latency
from benchmarks.six_systems.catalogue import Entry
from benchmarks.six_systems.clients import Step
from benchmarks.six_systems.hosts.nodes import Nodes, Plan, running

PER_HOST = "of each host"

Steps = dict[str, tuple[Step, Step, Step]]


class Amount(NamedTuple):
    """What each system holds."""

    block_bytes: int
    blocks_of_each: int
    """Of each client process."""

    processes: int
    """On each host."""

    def num_bytes(self, hosts: int) -> int:
        return self.block_bytes * self.blocks_of_each * self.processes * hosts


class Key(NamedTuple):
    system: str
    operation: str


def measure(
    runner: Runner, record: Record, title: str, entries: Sequence[Entry], amount: Amount,
    plan: Plan, steps: Steps, num_latencies: int,
) -> None:  # fmt: skip
    """Measure every system into `record`, one after the other. Where the hosts cannot be started,
    each has `SKIPPED` rows with the reason."""
    num_bytes = amount.num_bytes(len(plan.hosts))
    try:
        with running(plan) as nodes:
            _describe(record, nodes)
            for entry in entries:
                if not runner.interrupted:
                    _measure_one(runner, record, title, entry, amount, nodes, steps)
                if not runner.interrupted and num_latencies:
                    _latency(runner, record, entry, amount, nodes, num_latencies)
    except Skipped as reason:
        done = {row.transport for row in record.rows}
        sample = Sample(skipped=str(reason))
        record.rows += [Row(title, operation, num_bytes, sample, entry.name)
                        for entry in entries if entry.name not in done
                        for operation in steps]  # fmt: skip


def _describe(record: Record, nodes: Nodes) -> None:
    """The machines behind the names, without the names."""
    about = nodes.call("about")
    boots = [one.pop("boot") for one in about]
    machines = [*dict.fromkeys(boots)]
    record.parameters["hosts"] = [
        {"name": _name(number), "machine": machines.index(boot) + 1, **one}
        for number, (boot, one) in enumerate(zip(boots, about, strict=True))
    ]
    record.parameters["nodes"] = len(machines)


def _measure_one(
    runner: Runner, record: Record, title: str, entry: Entry, amount: Amount, nodes: Nodes,
    steps: Steps,
) -> None:  # fmt: skip
    runner.show(f"{title}: starting {entry.name} on {len(nodes.names)} hosts")
    keys = [Key(entry.name, operation) for operation in steps]
    with ExitStack() as stack:
        cases = _cases(runner, title, stack, keys, amount, nodes, steps)
        samples = runner.measure(title, cases)
    for key in keys:
        sample = samples[key]
        num_bytes = amount.num_bytes(len(nodes.names))
        record.rows.append(Row(title, key.operation, num_bytes, sample, entry.name))
        record.figures += _of_each_host(runner, title, key, sample, amount, len(nodes.names))


def _cases(
    runner: Runner, title: str, stack: ExitStack, keys: Sequence[Key], amount: Amount,
    nodes: Nodes, steps: Steps,
) -> list[Case]:  # fmt: skip
    if all(runner.is_measured(title, key) for key in keys):
        return [Case(key, lambda: None) for key in keys]
    stack.callback(_close, nodes)
    try:
        nodes.call("open", keys[0].system, *amount)
    except Skipped as reason:
        return [Case.skipped(key, reason) for key in keys]
    except Exception as error:  # any error of foreign software: only its rows fail
        return [Case(key, partial(_raise, error)) for key in keys]

    def verify(key: Key, step: Step) -> None:
        nodes.do(step)
        _keep(runner, title, key, nodes.step_s)

    made = []
    for key, (before, run, after) in zip(keys, steps.values(), strict=True):
        made.append(
            Case(key, partial(_timed, nodes, run), partial(nodes.do, before),
                 partial(verify, key, after))
        )  # fmt: skip
    return made


def _timed(nodes: Nodes, step: Step) -> None:
    nodes.do(step)


def _close(nodes: Nodes) -> None:
    nodes.call("close")


def _raise(error: Exception) -> None:
    raise error


def _keep(runner: Runner, title: str, key: Key, step_s: Sequence[float]) -> None:
    """The seconds of each host in one trial, beside those of all together."""
    number = len([*_kept(runner, title, key)])
    runner.journal.put((title, key, "hosts", number), [*step_s])


def _kept(runner: Runner, title: str, key: Key) -> Iterator[list[float]]:
    number = 0
    while (found := runner.journal.get(title, key, "hosts", number)) is not None:
        yield found
        number += 1


def _of_each_host(
    runner: Runner, title: str, key: Key, sample: Sample, amount: Amount, hosts: int
) -> list[Figure]:
    """GB/s by each host's own clock, medians. The row has all of them, until the last has ended."""
    if not sample.measured:
        return []
    trials = sample.timed([*_kept(runner, title, key)])
    own_bytes = amount.num_bytes(1)
    values = {
        _name(number): own_bytes / summarize([trial[number] for trial in trials]).median / 1e9
        for number in range(hosts)
    }
    return [Figure(f"{key.operation}, {PER_HOST}", "GB/s", values, key.system)]


def _latency(
    runner: Runner, record: Record, entry: Entry, amount: Amount, nodes: Nodes, number: int
) -> None:
    """Of all hosts together, which measure at once."""

    def measured() -> latency.Samples:
        each: list[Any] = nodes.call("latency", entry.name, amount.block_bytes, number)
        return {name: [one for of in each for one in of[name]] for name in each[0]}

    latency.into(record, runner, entry.name, amount.block_bytes, measured)


def _name(number: int) -> str:
    return f"host {number + 1}"
