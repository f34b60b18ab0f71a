"""An object store that fails in each way that stores fail in, below a server that is in use.

No wrong byte reaches a row, the fault is counted by its reason, lookups do not wait for it, and the
server holds nothing when it is over.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from bucket_scene import (
    MOST_BESIDE_MEMORY,
    PATIENCE_S,
    ROWS,
    Held,
    Scene,
    bucket_scene,
    bucket_server,
    chain_of,
    held_by,
    never_more,
    percentile_99,
    put,
    states,
)
from chaos_client import ChaosClient
from chaos_server import eventually
from http_faults import Damage, StoreFaults
from oracle import MEDIUM
from s3 import s3_server

from remote_server.store.bucket.opening import NUM_THREADS
from remote_server.store.bucket.reads import NUM_READERS

pytestmark = pytest.mark.whole

LOOKUPS = 200
"""In each half of a comparison: the same requests before and during the fault."""

YEAR_S = 365 * 86_400.0
OBJECTS = r"^GET [^?]*$"
READ = ("hit", "part hit", "miss", "late", "unavailable")

FAULTS = {
    "refused": (StoreFaults(refuse=True), ["failed_unreachable"]),
    "black hole": (StoreFaults(hold=True), ["failed_timeout"]),
    "frozen": (None, ["failed_timeout"]),
    "two seconds late": (StoreFaults(delay_s=2.0), ["failed_timeout"]),
    "slow down": (StoreFaults(status=503, code="SlowDown"), ["failed_throttled"]),
    "expired": (StoreFaults(status=403, code="ExpiredToken"), ["failed_forbidden"]),
    "absent": (StoreFaults(status=404, code="NoSuchKey", only=OBJECTS), ["dropped_absent"]),
    "cut": (StoreFaults(damage=Damage.CUT), ["failed_unreachable"]),
    "short": (StoreFaults(damage=Damage.SHORT), ["failed_short"]),
    "flipped": (StoreFaults(damage=Damage.FLIPPED), ["read_damaged", "headers_damaged"]),
    "swapped": (StoreFaults(damage=Damage.SWAPPED), ["read_damaged", "headers_damaged"]),
    "a year ahead": (StoreFaults(skew_s=YEAR_S), []),
    "a year back": (StoreFaults(skew_s=-YEAR_S), []),
}

STOP_S = 12.0
"""A process that has not ended after 15 s is killed."""


@pytest.fixture(scope="module")
def scene(seed) -> Iterator[Scene]:
    with s3_server() as store, bucket_scene(store, seed) as scene:
        warm = scene.written(8)
        scene.learned(warm)
        assert {scene.reads(one) for one in warm} == {"hit"}
        yield scene


@contextmanager
def fault(scene: Scene, faults: StoreFaults | None) -> Iterator[None]:
    """`faults` of the proxy in the block, or a store that is stopped."""
    try:
        if faults is None:
            scene.store.freeze()
        else:
            scene.proxy.set(faults)
        yield
    finally:
        scene.store.thaw()
        scene.proxy.clear()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_store_costs_its_own_blocks_and_no_lookup(scene, name, capsys):
    faults, reasons = FAULTS[name]
    before, held = scene.counters(), held_by(scene.server)

    def attempt() -> float:
        known, unknown = [scene.written(2) for _ in range(2)], [scene.written(2) for _ in range(2)]
        spare = scene.written(1)
        for some in known:
            scene.learned(some)
        quiet = endure(scene, known[0], unknown[0])
        failed = scene.counters()["bucket_read_failed"]
        with fault(scene, faults):
            during = endure(scene, known[1], unknown[1])
            eventually(
                lambda: all(grown(scene, before, reason) for reason in reasons),
                f"{reasons} are counted", PATIENCE_S,
            )  # fmt: skip
            failed = scene.counters()["bucket_read_failed"] - failed
            assert failed <= ROWS * len(known[1] + unknown[1]), "a get reads no row again and again"
        comes_back(scene, spare[0])
        show(capsys, name, quiet, during, scene, before)
        return percentile_99(during) / percentile_99(quiet)

    never_more(2.0, attempt)
    if not reasons:
        assert not any(grown(scene, before, name) for name in ("expired", "swept_packs", "removed"))
    holds_no_more(scene, held)


def test_a_server_ends_while_its_store_does_not_answer(scene):
    """Calls under way have their own time-outs; nothing kills it."""
    with fault(scene, StoreFaults(hold=True)):
        server = bucket_server(scene.store.url, scene.through, "--drain-timeout-s", "1").start()
        with ChaosClient(server.endpoint, "tcp") as client:
            client.wait_until_ready()
            assert put(client, scene.new_prompt()) == "stored"
            began = time.monotonic()
            server.stop()
            assert time.monotonic() - began < STOP_S


def endure(scene: Scene, known: list[range], unknown: list[range]) -> list[float]:
    """Reads, lookups of packs that are there and unknown, and puts, while lookups are timed."""
    client = scene.client
    gets = [client.get(MEDIUM, one, timeout_s=4.0) for one in known]
    times = scene.probe(LOOKUPS // 4, known)
    for one in unknown:
        states(client, one)
    new = scene.new_prompt()
    client.finish(client.lookup(MEDIUM, new, chain=chain_of(new)))
    assert client.finish(client.put(MEDIUM, new, chain=chain_of(new))) == "stored"
    times += scene.probe(LOOKUPS // 2, known)
    assert {client.finish(get) for get in gets} <= {*READ}
    assert {client.finish(client.get(MEDIUM, one, timeout_s=0.5)) for one in unknown} <= {*READ}
    assert client.finish(client.get(MEDIUM, new)) == "hit"
    return times + scene.probe(LOOKUPS // 4, known)


def grown(scene: Scene, before, reason: str) -> int:
    name = f"bucket_{reason}"
    return scene.counters()[name] - before[name]


def comes_back(scene: Scene, spare: range) -> None:
    """Packs are read as before, with the right bytes."""
    scene.learned([spare])
    assert scene.reads(spare) == "hit"


def holds_no_more(scene: Scene, before: Held) -> None:
    """No thread, no connection beyond one for each of the bucket's threads, no memory beyond what
    is documented."""
    stats = scene.server.wait_until_at_rest(PATIENCE_S)
    memory = stats.tiers["memory"]
    assert memory.used_bytes <= memory.budget_bytes
    after = held_by(scene.server)
    assert after.threads <= before.threads
    assert after.descriptors <= before.descriptors + NUM_THREADS + NUM_READERS
    assert after.resident_bytes <= before.resident_bytes + MOST_BESIDE_MEMORY


def show(capsys, name, quiet, during, scene, before) -> None:
    after = scene.counters()
    counted = {
        key.removeprefix("bucket_"): after[key] - before[key]
        for key in after
        if key.startswith("bucket_") and after[key] != before.get(key)
        and any(word in key for word in ("failed", "damaged", "absent", "pauses", "removed"))
    }  # fmt: skip
    with capsys.disabled():
        print(
            f"\n{name:17} lookups p99 {percentile_99(quiet) * 1e3:6.2f} ms without, "
            f"{percentile_99(during) * 1e3:6.2f} ms with; {counted}"
        )
