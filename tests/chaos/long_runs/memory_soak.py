"""A server with everything on, for minutes: does it keep within the memory that it accounts for?

    make memory-soak MINUTES=10 ARGS="--pack 64MiB"

Memory, disk and a bucket; two tenants with keys; clients over lanes in TLS, over ZeroMQ alone and
over shared memory, each in a process of its own, with prompts that are far more than memory and
disk. Some clients are killed or frozen all the time.

Each second the memory that the server has taken since its start is compared with what it accounts
for at that moment. What is beyond may be 64 MiB, and what ZeroMQ may hold of correct clients' puts.
The process of the store's client may have the packs under way and 64 MiB. Exit status: 0 all was
right, 1 it was not.
"""

import argparse
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from examples.processes import RemoteServer
from remote_server.allocator import private_bytes
from remote_server.client import ClientConfig, RemoteClient
from remote_server.keys import SERVER_FILE, TENANTS_FILE, make_keys
from remote_server.protocol import KeyState, Stretch
from remote_server.server.upkeep.private_memory import BYTES_PER_CONNECTION
from remote_server.shm.region import SharedRegion
from remote_server.store.bucket.objects.room import MAX_ROOM_BYTES
from remote_server.values import KiB, MiB, format_bytes

TENANTS = ("red", "blue")
WAYS = ({"transport": "tcp"}, {"transport": "tcp", "lanes": 0}, {"transport": "auto"})

MOST_BEYOND = 64 * MiB

ROW_BYTES = 512 * KiB
PROMPT_ROWS = 128
PROMPT_BYTES = PROMPT_ROWS * ROW_BYTES
ROW_TOKENS = 8
PROMPTS = 24
"""Of each tenant: 1.5 GiB."""

MEMORY, DISK = "512MiB", "512MiB"


# ── a client ─────────────────────────────────────────────────────────────────────────────


def client(endpoint: str, keys: str, way: int, seed: int) -> None:
    """Works until it is killed. Exits with an error when a byte is wrong."""
    rng = random.Random(seed)
    config = ClientConfig(endpoint, keys=keys, **WAYS[way])  # type: ignore[arg-type]
    with closing(RemoteClient(config)) as remote:
        remote.declare("soak", ROW_BYTES)
        region = SharedRegion(PROMPT_BYTES)
        remote.register(region.view, region.fd)
        rows = [region.view[at : at + ROW_BYTES] for at in range(0, PROMPT_BYTES, ROW_BYTES)]
        chain = [Stretch(PROMPT_ROWS, 0, 0, ROW_TOKENS)]
        while True:
            prompt = min(int(rng.expovariate(0.15)), PROMPTS - 1)
            keys_of = [b"%-16d%-16d" % (prompt, row) for row in range(PROMPT_ROWS)]
            looked_up = remote.lookup("soak", keys_of, chain=chain, timeout_s=5)
            if looked_up.exception() is not None:
                continue
            states = looked_up.result().states
            there = [row for row, state in enumerate(states) if state == KeyState.READABLE]
            got = remote.get(
                "soak", [keys_of[row] for row in there], [rows[row] for row in there],
                stall_s=30, timeout_s=60,
            ).result()  # fmt: skip
            for row, outcome in zip(there, got.outcomes, strict=True):
                if outcome.name == "HIT" and bytes(rows[row][:32]) != keys_of[row]:
                    sys.exit(f"row {row} of prompt {prompt} is another's")
            for row, key in enumerate(keys_of):
                rows[row][:32] = key
            remote.put("soak", keys_of, rows, chain=chain, timeout_s=60).result()


# ── the soak ─────────────────────────────────────────────────────────────────────────────


class Clients:
    """One process for each tenant and way, killed and frozen at random."""

    def __init__(self, endpoint: str, folder: Path, seed: int) -> None:
        self._endpoint, self._folder, self._rng = endpoint, folder, random.Random(seed)
        self._running = [self._start(number) for number in range(len(TENANTS) * len(WAYS))]
        self.num_killed = 0

    def _start(self, number: int) -> "subprocess.Popen[bytes]":
        tenant, way = TENANTS[number % len(TENANTS)], number // len(TENANTS)
        keys, seed = str(self._folder / f"client-{tenant}.key"), self._rng.randrange(1 << 30)
        command = [__file__, "--client", self._endpoint, keys, str(way), str(seed)]
        return subprocess.Popen([sys.executable, *command])

    def shake(self) -> None:
        """One of them is killed, and one frozen for the next second."""
        for process in self._running:
            code = process.poll()
            assert code is None, f"a client ended with {code}"
            process.send_signal(signal.SIGCONT)
        self._rng.choice(self._running).send_signal(signal.SIGSTOP)
        number = self._rng.randrange(len(self._running))
        if self._rng.random() < 0.2:
            self._end(self._running[number])
            self._running[number] = self._start(number)
            self.num_killed += 1

    def close(self) -> None:
        for process in self._running:
            self._end(process)

    @staticmethod
    def _end(process: "subprocess.Popen[bytes]") -> None:
        process.kill()
        process.wait()


class Watch:
    """Samples the server and the process of its store's client."""

    def __init__(self, server: RemoteServer, admin: int) -> None:
        self._server, self._admin = server, admin
        self.most_beyond = self.most_in_child = 0
        self.counters: dict[str, int] = {}

    def _in_child(self) -> int:
        threads = Path(f"/proc/{self._server.pid}/task").glob("*/children")
        return sum(private_bytes(pid) for thread in threads for pid in thread.read_text().split())

    def look(self, seconds: float, num_killed: int) -> None:
        """Take a sample, and print a line."""
        try:
            with urlopen(f"http://127.0.0.1:{self._admin}/stats", timeout=60) as answer:
                stats = json.load(answer)
        except HTTPError:  # it is busy for longer than an answer may take
            return
        grown, known = stats["private_bytes"], sum(stats["accounts"].values())
        in_child = self._in_child()
        self.counters = stats["counters"]
        self.most_beyond = max(self.most_beyond, grown - known)
        self.most_in_child = max(self.most_in_child, in_child)
        tiers = ", ".join(
            f"{name} {tier['used_bytes'] // MiB}" for name, tier in stats["tiers"].items()
        )
        print(
            f"{seconds:5.0f} s: grown {grown / MiB:5.0f} MiB, accounted for {known / MiB:5.0f}, "
            f"beyond it {(grown - known) / MiB:5.0f}; process of the store {in_child / MiB:4.0f}; "
            f"blocks {tiers} MiB; {num_killed} kills",
            flush=True,
        )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def soak(minutes: float, pack: str, seed: int, folder: Path) -> bool:
    """Whether the server has kept within its account."""
    make_keys(folder, TENANTS)
    tenants = folder / TENANTS_FILE
    for name in TENANTS:
        table = f"[{name}]\n"
        assert table in tenants.read_text()
        tenants.write_text(tenants.read_text().replace(table, f'{table}disk = "256MiB"\n'))
    (folder / "bucket").mkdir()
    (folder / "disk").mkdir(0o700)
    admin = free_port()
    flags = {
        "--disk": folder / "disk", "--disk-bytes": DISK, "--disk-write-rate": 0,
        "--bucket": f"file://{folder}/bucket", "--pack": pack, "--bucket-admit": "all",
        "--bucket-write-rate": 0, "--keys": folder / SERVER_FILE,
        "--tenants": tenants, "--admin": f"http://127.0.0.1:{admin}",
    }  # fmt: skip
    args = [str(part) for flag in flags.items() for part in flag]
    with ExitStack() as stack:
        server = stack.enter_context(RemoteServer(MEMORY, args=args))
        watch = Watch(server, admin)
        clients = Clients(server.endpoint, folder, seed)
        stack.callback(clients.close)
        began = time.monotonic()
        while (seconds := time.monotonic() - began) < 60 * minutes:
            time.sleep(1)
            clients.shake()
            watch.look(seconds, clients.num_killed)
    counters = watch.counters
    most = MOST_BEYOND + len(TENANTS) * len(WAYS) * BYTES_PER_CONNECTION
    print(
        f"packs of {pack}: at most {format_bytes(watch.most_beyond)} beyond the account, "
        f"{format_bytes(most)} allowed; in the store's process {format_bytes(watch.most_in_child)}"
    )
    names = ("put_created", "get_hit", "hits_disk", "sockets_replaced", "internal_errors")
    print("  ".join(f"{name} {counters[name]}" for name in names))
    is_quiet = not (counters["sockets_replaced"] or counters["internal_errors"])
    within = watch.most_beyond <= most and watch.most_in_child <= MAX_ROOM_BYTES + MOST_BEYOND
    return within and is_quiet


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--pack", default="16MiB")
    parser.add_argument("--seed", type=int, default=20)
    flags = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="kvferry-soak-", ignore_cleanup_errors=True) as folder:
        try:
            return 0 if soak(flags.minutes, flags.pack, flags.seed, Path(folder)) else 1
        except KeyboardInterrupt:
            return 130


if __name__ == "__main__":
    if sys.argv[1:2] == ["--client"]:
        client(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    sys.exit(main())
