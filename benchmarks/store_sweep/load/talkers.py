"""A process of clients, each a thread that holds conversations over its own connection.

python -m … SERVERS NAMESPACE BLOCK_BYTES CLIENTS SECONDS PAUSE_MS SPEAKER

SERVERS are separated by commas; two or more are a fleet, and each client uses all of it.

Prints `ready` when each client has held one conversation, begins at a line on stdin, and prints its
results as one line of JSON.
"""

import json
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from benchmarks.harness.runner import nothing
from benchmarks.remote_kv_cache.work import blocks
from benchmarks.remote_kv_cache.work.ferry_client import PATIENCE_S, connect_to
from benchmarks.store_sweep.load.conversation import BLOCKS, TURNS, chain_of, keys_of
from benchmarks.store_sweep.points import PARTS
from remote_server.allocator import keep_freed_memory
from remote_server.client import CacheClient, GetTimes

MODULE = "benchmarks.store_sweep.load.talkers"

# The tolerance between a read and the sum of its parts, as a fraction of the read.
_APART = 0.05

T = TypeVar("T")


@dataclass
class Talk:
    """The results of one client. Milliseconds of each operation."""

    lookups: list[float] = field(default_factory=list)
    reads: list[float] = field(default_factory=list)
    writes: list[float] = field(default_factory=list)
    split_ms: list[float] = field(default_factory=lambda: [0.0] * (len(PARTS) + 1))
    """Sums over the timed reads: of each part, and of the reads."""

    timed: int = 0
    """Reads with times."""

    apart: int = 0
    """Of these, those whose parts do not sum up to the read within 5 %."""

    conversations: float = 0.0
    """Conversations while all other clients were busy, with the fraction of the last one."""

    seconds: float = 0.0
    """The seconds of these conversations."""

    errors: list[str] = field(default_factory=list)


class Talker:
    """One client. A conversation with any failure counts as an error and not as a conversation."""

    def __init__(self, client: CacheClient, namespace: str, block_bytes: int, speaker: str) -> None:
        self._client = client
        self._namespace = namespace
        self._speaker = speaker.encode()
        self._number = 0
        # Filling needs a whole number of words, which the source's payload is not.
        source, target = (blocks.allocate(BLOCKS, block_bytes + -block_bytes % 8) for _ in range(2))
        blocks.fill(source)
        self._source = [memoryview(row)[:block_bytes] for row in source]
        self._target = [memoryview(row)[:block_bytes] for row in target]

    def talk_for(
        self, seconds: float, pause: Callable[[], object] = nothing,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Talk:  # fmt: skip
        """Hold conversations for `seconds`, at least one, the last one to its end, so that no
        client is alone before the time is over. `pause` is called before each turn."""
        talk = Talk(seconds=seconds)
        began, now = clock(), 0.0
        while not now or now < seconds:
            before = now
            good = self._hold_one(talk, pause)
            now = clock() - began
            if good:
                talk.conversations += min(1.0, (seconds - before) / (now - before))
        return talk

    def _hold_one(self, talk: Talk, pause: Callable[[], object]) -> bool:
        try:
            self._converse(talk, pause)
        except Exception as error:  # the others continue, and the point reports the error
            talk.errors.append(f"{type(error).__name__}: {error}"[:300])
            return False
        return True

    def _converse(self, talk: Talk, pause: Callable[[], object]) -> None:
        keys = keys_of(self._speaker, self._number)
        self._number += 1
        for row, key in zip(self._source, keys, strict=True):
            row[: len(key)] = key
        for turn in TURNS:
            pause()
            self._look_up(keys[: turn.full], turn.known, talk)
            if turn.known:
                self._read(keys[: turn.known], talk)
            if turn.full > turn.known:
                self._write(keys, turn.known, turn.full, talk)

    def _look_up(self, keys: list[bytes], known: int, talk: Talk) -> None:
        found = _timed(
            talk.lookups,
            lambda: self._client.lookup(
                self._namespace,
                keys,
                chain=chain_of(0, len(keys)),
                timeout_s=PATIENCE_S,
                anchors=_anchors(keys),
            ).result(),
        )
        if found.prefix != known:
            raise AssertionError(f"{found.prefix} blocks readable, {known} were written")

    def _read(self, keys: list[bytes], talk: Talk) -> None:
        rows = self._target[: len(keys)]
        for row in rows:
            row[: len(keys[0])] = bytes(len(keys[0]))
        result = _timed(
            talk.reads,
            lambda: self._client.get(
                self._namespace, keys, rows, stall_s=PATIENCE_S, timeout_s=PATIENCE_S, timed=True,
                anchors=_anchors(keys),
            ).result(),
        )  # fmt: skip
        if result.times is not None:
            add_split(talk, result.times, time.monotonic())
        if len(result.landed) != len(keys):
            raise AssertionError(f"not all blocks came: {result.outcomes}, {result.error}")
        for row, key in zip(rows, keys, strict=True):
            if row[: len(key)] != key:
                raise AssertionError("another conversation's block came")

    def _write(self, keys: list[bytes], first: int, end: int, talk: Talk) -> None:
        result = _timed(
            talk.writes,
            lambda: self._client.put(
                self._namespace, keys[first:end], self._source[first:end],
                deferred=False, timeout_s=PATIENCE_S, chain=chain_of(first, end),
                anchors=_anchors(keys)[first:end],
            ).result(),
        )  # fmt: skip
        if result.created != end - first:
            raise AssertionError(f"{result.created} of {end - first} blocks kept: {result}")


def _anchors(keys: list[bytes]) -> list[bytes]:
    """A conversation is shorter than the first run."""
    return keys[:1] * len(keys)


def add_split(talk: Talk, times: GetTimes, now: float) -> None:
    """Book the last of `talk.reads`, which ended `now` for its caller. The time since its last
    block was verified counts as the client's `deserialize`."""
    parts_s = [times.serialize_s, times.network_s, times.server_s, times.storage_s,
               times.deserialize_s + now - times.ended]  # fmt: skip
    parts_ms = [1e3 * part for part in parts_s]
    read_ms = talk.reads[-1]
    for place, value in enumerate([*parts_ms, read_ms]):
        talk.split_ms[place] += value
    talk.timed += 1
    talk.apart += abs(sum(parts_ms) - read_ms) > _APART * read_ms


def _timed(samples: list[float], ask: Callable[[], T]) -> T:
    began = time.perf_counter()
    answer = ask()
    samples.append(round(1e3 * (time.perf_counter() - began), 4))
    return answer


def pauses(
    mean_ms: float, speaker: str, sleep: Callable[[float], object] = time.sleep
) -> Callable[[], object]:
    """A call that waits `mean_ms` on average, uniformly between half and one and a half of it:
    clients with equal waits would run in step. Deterministic for a speaker."""
    lengths = random.Random(speaker)
    return lambda: sleep(lengths.uniform(0.5, 1.5) * mean_ms / 1e3)


def main(argv: Sequence[str] | None = None) -> None:
    servers, namespace, block_bytes, clients, seconds, pause_ms, speaker = (
        sys.argv[1:] if argv is None else argv
    )
    keep_freed_memory()
    talkers = []
    for number in range(int(clients)):
        client = connect_to(servers, namespace, int(block_bytes))
        talkers.append(Talker(client, namespace, int(block_bytes), f"{speaker} {number}"))
    warm_up = [talker.talk_for(0) for talker in talkers]
    if errors := [error for talk in warm_up for error in talk.errors]:
        sys.exit(f"the first conversation failed: {errors[0]}")
    print("ready", flush=True)
    if not sys.stdin.readline():
        return  # the parent process has ended
    talks = [Talk()] * len(talkers)

    def run(place: int) -> None:
        pause = pauses(float(pause_ms), f"{speaker} {place}") if float(pause_ms) else nothing
        talks[place] = talkers[place].talk_for(float(seconds), pause)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(talkers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps([asdict(talk) for talk in talks]), flush=True)


if __name__ == "__main__":
    main()
