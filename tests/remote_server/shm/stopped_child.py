"""A process that transfers blocks through shared memory until its standard input ends.

    python stopped_child.py get|put ENDPOINT BLOCK_BYTES NUM_KEYS

It stops itself now and then at one of the points where that is dangerous, and its parent makes it
go on. `get` checks every block that was announced; `put` overwrites its rows as soon as it has
them back. Checksums are off: what keeps wrong bytes out is the generation words and the tickets
alone. Prints what happened, as JSON.
"""

import json
import os
import random
import signal
import sys
import threading
from collections import Counter

from client_helpers import NAMESPACE, block, key
from fake_server import eventually
from held import Point, install

from remote_server.client import ClientConfig, GetOutcome, RemoteClient, SharedRegion

BATCH = 48
STOPS = 1 / 80
"""How often, of all the times that such a point is passed."""


def get(client, rows, num_keys, rng, counts):
    numbers = [rng.randrange(num_keys) for _ in rows]
    keys = [key(number) for number in numbers]
    timeout_s = rng.choice([0.005, 60.0, 60.0])
    got = client.get(NAMESPACE, keys, rows, stall_s=timeout_s, timeout_s=timeout_s).result()
    counts.update(outcome.value for outcome in got.outcomes)
    for index in got.landed:
        if rows[index] != block(numbers[index], rows[index].nbytes):
            counts["wrong"] += 1
    # Late bytes would show up here as well: these rows are ours until the next get.
    marked = [index for index, outcome in enumerate(got.outcomes) if outcome is GetOutcome.LATE]
    for index in marked:
        rows[index][:] = b"\xee" * rows[index].nbytes
    client.check(timeout_s=60)
    counts["wrong"] += sum(rows[index][0] != 0xEE for index in marked)


def put(client, rows, first, rng, counts):
    keys = [key(first + number) for number in range(len(rows))]
    for number, row in enumerate(rows):
        row[:] = block(first + number, row.nbytes)
    future = client.put(NAMESPACE, keys, rows, timeout_s=rng.choice([0.002, 0.01, 60.0]))
    stored = future.result()
    for row in rows:
        row[:] = b"\xee" * row.nbytes
    counts["created"] += stored.created
    counts["unanswered"] += stored.outcomes.count(None)


def main() -> None:
    what, endpoint, block_bytes, num_keys = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
    rng, counts = random.Random(1), Counter()
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    region = SharedRegion(BATCH * block_bytes)
    config = ClientConfig(
        endpoint, transport="shm", integrity=False, breaker_timeouts=10**9,
        shared_window_bytes=8 * block_bytes,
    )  # fmt: skip

    def pause(point: Point) -> None:
        if rng.random() < STOPS:
            counts[f"stopped {point.name.lower()}"] += 1
            os.kill(os.getpid(), signal.SIGSTOP)

    install().pause = pause
    client = RemoteClient(config)
    client.register(region.view, region.fd)
    client.declare(NAMESPACE, block_bytes)
    eventually(lambda: client.ready)

    rows = [region.view[i * block_bytes : (i + 1) * block_bytes] for i in range(BATCH)]
    print("ready", flush=True)
    rounds = 0
    while not over.is_set():
        if what == "get":
            get(client, rows, num_keys, rng, counts)
        else:
            put(client, rows, rounds * BATCH, rng, counts)
        rounds += 1
    names = ("expired_blocks", "withdrawn_puts", "internal_errors", "protocol_errors")
    counts.update({name: client.counters()[name] for name in names})
    counts["rounds"] = rounds
    client.close()
    print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main()
