"""Seeded clients in seeded weather: the whole system under everything at once, and its accounts.

A *faulted* operation overlapped a fault on its client's way or of the server, from submission to
end, or it ended by one (`actors.ENDED_BY_A_FAULT`; short deadlines are faults, too). Cancellations
and closes in mid-transfer are faults themselves. A damaged message or block is a fault only while
damage is done: what is found later counts when it ends an operation.

The run goes in rounds. After each, without faults, every client is ready again and holds nothing;
the server has nothing pinned, leased or pending, its memory and disk are within their budgets, and
it has no more files and threads than after the first round's warm-up.

A seed fixes what each client asks and which faults come for how long. How the two meet is up to
the machine, so a seed that failed is run again rather than replayed to the letter.
"""

import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path

from actors import SETTLE_S, Habits, Totals
from chaos_client import use_all
from chaos_server import ChaosServer, resident_bytes
from crew import Crew, CrewPlan, Held, Tally, no_more_than, open_once, steady
from owned_process import OwnedProcess
from sky import Sky
from weather import MORTAL, Weather

from remote_server.protocol import StatsReply
from remote_server.server.lanes.lanes import STALL_S

MiB = 1 << 20

MOST_BESIDE_MEMORY = 128 * MiB
"""Of the server's resident memory: the interpreter, libraries, messages under way."""

REST_S = SETTLE_S + STALL_S
"""A lane on which the last block was lost keeps the slots of its put until it counts as stalled."""

_POLL_S = 0.05


@dataclass(frozen=True)
class Plan:
    """What a run does, until it has `operations`, so many of them `faulted`, or has lasted
    `seconds`."""

    seed: int
    operations: float = inf
    faulted: float = inf
    seconds: float = inf
    round_s: float = inf
    transports: tuple[str, ...] = ("tcp", "shm", "lanes", "shm")
    """Of the clients of one crew."""

    processes: int = 0
    """Crews, each in a process of its own. 0: one crew in this process."""

    habits: Habits = field(default_factory=Habits)
    memory: str = "32MiB"
    disk_bytes: str = ""
    """Empty: no disk."""

    server_faults: tuple[str, ...] = MORTAL
    calm: bool = False
    """Without faults on the way and of the server."""

    storm: bool = False
    """On the way, faults of lanes alone."""


@dataclass
class Report:
    """What happened. Anything wrong was raised, so that what is here was right."""

    seed: int
    seconds: float = 0.0
    rounds: int = 0
    interrupted: bool = False
    tally: Tally = field(default_factory=Tally)
    server: Counter[str] = field(default_factory=Counter)
    """Counters of all boots, read between rounds and before kills."""

    @property
    def totals(self) -> Totals:
        return self.tally.totals

    def __str__(self) -> str:
        tally, outcomes = self.tally, self.totals.outcomes
        words = sorted({word for _, word in outcomes})
        ops = sorted({op for op, _ in outcomes})
        lines = [
            f"seed {self.seed}: {tally.operations} operations, {tally.faulted} of them faulted, in "
            f"{self.seconds:.0f} s, latest end {max(0.0, self.totals.worst_overrun_s) * 1e3:.0f} "
            f"ms behind its deadline, {self.rounds} checks at rest",
            "".join(["  ", "operation".ljust(9), *(word.rjust(12) for word in words)]),
        ]
        for op in ops:
            cells = (str(outcomes[op, word] or ".").rjust(12) for word in words)
            lines.append("".join(["  ", op.ljust(9), *cells]))
        lines.append(_listed("keys of gets", self.totals.blocks))
        lines.append(_listed("faults", tally.faults) + f"; {tally.tampered} units tampered with")
        lines.append(_listed("clients", Counter({n: self.totals.counters[n] for n in _OF_CLIENTS})))
        lines.append(_listed("servers", Counter({name: self.server[name] for name in _OF_SERVER})))
        return "\n".join(lines)


_OF_CLIENTS = (
    "connects", "lanes_opened", "lanes_broken", "server_restarts", "breaker_opened",
    "checksum_failures", "short_blocks", "verify_sent", "verify_removed", "verify_intact",
    "expired_blocks", "withdrawn_puts", "get_resets", "put_resets", "protocol_errors",
    "late_replies", "shm_attached", "released_leases",
)  # fmt: skip
_OF_SERVER = (
    "evicted", "disk_written", "disk_read", "disk_evicted", "disk_recovered", "leases_expired",
    "regions_attached",
)  # fmt: skip


def _listed(title: str, counts: Counter[str]) -> str:
    return f"  {title}: " + ", ".join(f"{name} {counts[name]}" for name in sorted(counts))


class Run:
    """One run of a plan. A context: the server and all processes have ended after it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.report = Report(plan.seed)
        """Up to the last check at rest, or to a failure."""
        self.faults: Counter[str] = Counter()
        """Of the server."""
        self._stack = ExitStack()
        self._stop = threading.Event()
        self._done = False
        self._counted_epoch = ""
        self._counted: dict[str, int] = {}

    def __enter__(self) -> "Run":
        with ExitStack() as stack:
            self._set_up(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _set_up(self, stack: ExitStack) -> None:
        plan = self.plan
        self._folder = None
        if plan.disk_bytes:
            folder = tempfile.TemporaryDirectory(
                prefix="kvferry-chaos-", ignore_cleanup_errors=True
            )
            self._folder = Path(stack.enter_context(folder))
        self.server = stack.enter_context(
            ChaosServer(plan.memory, self._folder, plan.disk_bytes or "0")
        )
        self._unused = self._held_after_use()
        self._sky = Sky()
        self.crews: list[Crew | OwnedProcess] = []
        for number in range(plan.processes or 1):
            crew_plan = CrewPlan(
                number, plan.seed, plan.transports, plan.habits, plan.calm, plan.storm
            )
            make = partial(OwnedProcess, Crew) if plan.processes else Crew
            self.crews.append(make(crew_plan, self.server.endpoint, self._sky))
            stack.callback(self.crews[-1].close)
        for crew in self.crews:
            crew.warm_up()
        self._used = steady(self._held)
        self._began = time.monotonic()

    def stop(self) -> None:
        """End the run with this round. Any thread, or a signal's handler, may call it."""
        self.report.interrupted = not self._done
        self._stop.set()

    def go(self, watch: Callable[["Run"], None] = lambda _: None) -> Report:
        """Round after round; `watch` is called several times a second while they work. Raises what
        was wrong: bytes, a hang, a leak, or books that do not balance."""
        try:
            while not self._done:
                self.round(watch)
                self.check()
            self._end()
        except BaseException:
            with suppress(Exception):  # a crew may have ended
                self._sum_up()
            raise
        return self.report

    @property
    def num_kills(self) -> int:
        """Of the server, so far."""
        return self.faults["server: kill"]

    @property
    def seconds(self) -> float:
        """Since the start of the first round."""
        return time.monotonic() - self._began

    # ── a round ──────────────────────────────────────────────────────────────────────────

    def round(self, watch: Callable[["Run"], None] = lambda _: None) -> None:
        """Work until it is over, or there is enough. No fault is left afterwards."""
        number = self.report.rounds
        weather = Weather(
            f"{self.plan.seed}/round {number}", self.server, [], kinds=self.plan.server_faults,
            server_sky=self._sky, before_kill=self._count_boot, moved=self._aim,
        )  # fmt: skip
        weather.faults = self.faults
        ends = time.monotonic() + self.plan.round_s
        with ExitStack() as stack:  # all of them end, whatever fails
            for crew in self.crews:
                crew.begin(number)
                stack.callback(crew.stop)
            if not self.plan.calm:
                weather.start()
                stack.callback(weather.stop)
            while not self._done and time.monotonic() < ends and not weather.errors:
                time.sleep(_POLL_S)
                self._done = self._stop.is_set() or self._is_enough()
                watch(self)

    def _is_enough(self) -> bool:
        progress = [crew.progress() for crew in self.crews]
        return (
            sum(one.operations for one in progress) >= self.plan.operations
            or sum(one.faulted for one in progress) >= self.plan.faulted
            or self.seconds >= self.plan.seconds
        )

    def _aim(self, endpoint: str) -> None:
        for crew in self.crews:
            crew.aim(endpoint)

    def _count_boot(self) -> None:
        self._count(self.server.stats())

    def _count(self, stats: StatsReply) -> None:
        """Add what this boot has counted since the last call."""
        last = self._counted if self._counted_epoch == stats.epoch else {}
        self.report.server.update(
            {name: value - last.get(name, 0) for name, value in stats.counters.items()}
        )
        self._counted_epoch, self._counted = stats.epoch, stats.counters

    # ── at rest ──────────────────────────────────────────────────────────────────────────

    def check(self, patience_s: float = REST_S) -> None:
        """Nothing is under way: AssertionError if something is still held after `patience_s`, by
        either side."""
        for crew in self.crews:
            crew.settle(patience_s)
        stats = self.server.wait_until_at_rest(patience_s)
        self._count(stats)
        self._check_budgets(stats)
        no_more_than(self._used, self._held, "the server", patience_s)
        self.report.rounds += 1
        self._sum_up()

    def _sum_up(self) -> None:
        """The report has all up to now."""
        self.report.seconds = self.seconds
        self.report.tally = tally = Tally()
        for crew in self.crews:
            tally.add(crew.tally())
        tally.faults.update(self.faults)

    def _check_budgets(self, stats: StatsReply) -> None:
        for name, tier in stats.tiers.items():
            assert tier.used_bytes <= tier.budget_bytes, f"{name} is larger than its budget"
        assert stats.counters["internal_errors"] == 0, stats.counters
        resident = resident_bytes(self.server.pid)
        most = stats.tiers["memory"].budget_bytes + MOST_BESIDE_MEMORY
        assert resident <= most, f"the server takes {resident / MiB:.0f} MiB"
        if self._folder is not None:
            on_disk = sum(_size(path) for path in self._folder.iterdir())
            assert on_disk <= stats.tiers["disk"].budget_bytes + MiB, f"{on_disk} bytes on disk"

    def _held(self) -> Held:
        """Its segments on disk do not count: their number follows from what it stores."""
        return Held.by(self.server.pid, beside=str(self._folder) if self._folder else "\0")

    def _held_after_use(self) -> Held:
        """What the server has open when clients have come and gone. pyzmq opens a few files, once
        in a process, with the first frame that it does not copy; also in this process."""
        use_all(self.server.endpoint)
        self.server.wait_until_at_rest()
        return steady(self._held)

    def _end(self) -> None:
        for crew in self.crews:
            crew.end()
        self.server.wait_until_at_rest(REST_S)
        no_more_than(self._unused, self._held, "the server, without clients,")


def _size(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def run(plan: Plan) -> Report:
    """Raises what was wrong. This process has no more files open after it than before."""
    open_once()
    before = Held.by(os.getpid())
    with Run(plan) as one:
        report = one.go()
    no_more_than(before, lambda: Held.by(os.getpid()), "this process")
    return report
