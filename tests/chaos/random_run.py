"""Seeded clients in seeded weather: the whole system under everything at once, and its accounts.

    python tests/chaos/random_run.py --seed 7 --requests 100000

A seed fixes what each client asks and which faults come for how long. How the two meet is up to
the machine, so a seed that failed is run again rather than replayed to the letter.
"""

import argparse
import os
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field

from actors import Actor, Totals
from chaos_client import ChaosClient
from chaos_server import ChaosServer, eventually, open_files
from fault_proxy import FaultProxy
from oracle import LARGE
from weather import Weather

TRANSPORTS = ("tcp", "shm", "tcp", "shm")


@dataclass
class Report:
    """What happened. Anything wrong was raised, so that what is here was right."""

    seed: int
    seconds: float = 0.0
    totals: Totals = field(default_factory=Totals)
    faults: Counter[str] = field(default_factory=Counter)
    tampered: int = 0

    @property
    def num_requests(self) -> int:
        return sum(self.totals.outcomes.values())

    def __str__(self) -> str:
        words = sorted({word for _, word in self.totals.outcomes})
        ops = sorted({op for op, _ in self.totals.outcomes})
        lines = [
            f"seed {self.seed}: {self.num_requests} requests in {self.seconds:.0f} s, "
            f"latest end {max(0.0, self.totals.worst_overrun_s) * 1e3:.0f} ms behind its deadline",
            "".join(["  ", "request".ljust(9), *(word.rjust(12) for word in words)]),
        ]
        for op in ops:
            cells = (str(self.totals.outcomes[op, word] or ".").rjust(12) for word in words)
            lines.append("".join(["  ", op.ljust(9), *cells]))
        lines.append(_listed("keys of gets", self.totals.blocks))
        lines.append(_listed("faults", self.faults) + f"; {self.tampered} messages tampered with")
        names = (
            "connects", "server_restarts", "breaker_opened", "checksum_failures", "short_blocks",
            "verify_removed", "verify_intact", "expired_blocks", "withdrawn_puts", "get_resets",
            "put_resets", "protocol_errors", "late_replies",
        )  # fmt: skip
        lines.append(
            _listed("clients", Counter({name: self.totals.counters[name] for name in names}))
        )
        return "\n".join(lines)


def _listed(title: str, counts: Counter[str]) -> str:
    return f"  {title}: " + ", ".join(f"{name} {counts[name]}" for name in sorted(counts))


def run(seed: int, num_requests: int, most_seconds: float = 3600.0) -> Report:
    """Raises what was wrong: bytes, a hang, a leak, or books that do not balance."""
    report = Report(seed)
    began = time.monotonic()
    with ExitStack() as stack:
        server = stack.enter_context(ChaosServer())
        files_of_server = _files_after_use(server)
        files_before = open_files(os.getpid())
        proxies = [
            stack.enter_context(FaultProxy(server.endpoint, seed + number))
            for number in range(len(TRANSPORTS))
        ]
        actors = [
            Actor(f"{transport} {number}", seed, proxy.endpoint, transport)
            for number, (transport, proxy) in enumerate(zip(TRANSPORTS, proxies, strict=True))
        ]
        weather = Weather(seed, server, proxies)
        weather.start()
        errors = _act(actors, num_requests, began + most_seconds)
        for proxy in proxies:
            report.tampered += sum(proxy.counts.values())
        weather.stop()
        if errors:
            raise errors[0]
        for actor in actors:
            eventually(lambda actor=actor: actor.ready, f"{actor.name} is ready again", 20.0)
        for actor in actors:
            actor.end()
        server.wait_until_at_rest(20.0)
        eventually(
            lambda: open_files(server.pid) <= files_of_server, "the server holds no more files"
        )
        eventually(
            lambda: not any(proxy.num_connections for proxy in proxies), "no connection is left"
        )
    eventually(lambda: open_files(os.getpid()) <= files_before, "no file of ours is left")
    report.seconds = time.monotonic() - began
    report.faults = weather.faults
    for actor in actors:
        report.totals.add(actor.totals())
    return report


def _files_after_use(server: ChaosServer) -> int:
    """What the server has open when clients have come and gone. pyzmq opens a few files, once in
    a process, with the first frame that it does not copy; also in this process."""
    for transport in ("tcp", "shm"):
        with ChaosClient(server.endpoint, transport) as client:
            client.wait_until_ready()
            assert client.finish(client.put(LARGE, [0], force=True)) == "stored"
            assert client.finish(client.get(LARGE, [0])) == "hit"
    server.wait_until_at_rest()
    number = open_files(server.pid)
    eventually(lambda: open_files(server.pid) == number, "the number of open files stands")
    return number


def _act(actors: list[Actor], num_requests: int, until: float) -> list[BaseException]:
    """Let all of them run until that many requests were made; gives what went wrong."""
    left, turn, errors = [num_requests], threading.Lock(), []

    def take_turn() -> bool:
        with turn:
            left[0] -= 1
            return left[0] >= 0 and not errors and time.monotonic() < until

    def run(actor: Actor) -> None:
        try:
            actor.run(take_turn)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(actor,), daemon=True) for actor in actors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    parser.add_argument("--requests", type=int, default=10_000)
    flags = parser.parse_args()
    try:
        print(run(flags.seed, flags.requests))
    except BaseException:
        print(f"failed with --seed {flags.seed}", file=sys.stderr)
        raise


if __name__ == "__main__":
    main()
