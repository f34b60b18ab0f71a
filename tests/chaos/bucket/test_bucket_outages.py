"""An object store that fails in each way that stores fail in, below a server that is in use.

No wrong byte reaches a row, the fault is counted by its reason, lookups do not wait for it, and the
server holds nothing when it is over.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from bucket_scene import (
    MOST_BESIDE_MEMORY,
    ROWS,
    Held,
    Scene,
    bucket_scene,
    bucket_server,
    chain_of,
    held_by,
    put,
    states,
)
from chaos_client import ChaosClient
from chaos_server import eventually
from http_faults import Damage, StoreFaults
from oracle import MEDIUM
from s3 import s3_server

from remote_server.store.bucket.opening import NUM_THREADS
from remote_server.store.bucket.transfers.reads import NUM_READERS

pytestmark = pytest.mark.whole

LOOKUPS = 50
"""Between two other requests."""

OBJECTS = r"^GET [^?]*$"
READ = ("hit", "part hit", "miss", "late", "unavailable")

FAULTS = {
    "refused": (StoreFaults(refuse=True), ["failed_unreachable"]),
    "black hole": (StoreFaults(hold=True), ["failed_timeout"]),
    "frozen": (None, ["failed_timeout"]),
    "slow down": (StoreFaults(status=503, code="SlowDown"), ["failed_throttled"]),
    "expired": (StoreFaults(status=403, code="ExpiredToken"), ["failed_forbidden"]),
    "absent": (StoreFaults(status=404, code="NoSuchKey", only=OBJECTS), ["dropped_absent"]),
    "cut": (StoreFaults(damage=Damage.CUT), ["failed_unreachable"]),
    "short": (StoreFaults(damage=Damage.SHORT), ["failed_short"]),
    "flipped": (StoreFaults(damage=Damage.FLIPPED), ["read_damaged", "headers_damaged"]),
    "swapped": (StoreFaults(damage=Damage.SWAPPED), ["read_damaged", "headers_damaged"]),
}


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
def test_a_fault_of_the_store_costs_its_own_blocks_and_no_lookup(scene, name):
    faults, reasons = FAULTS[name]
    before, held = scene.counters(), held_by(scene.server)
    known, unknown, spare = (scene.written(count) for count in (2, 2, 1))
    scene.learned(known)
    failed = scene.counters()["bucket_read_failed"]
    with fault(scene, faults):
        endure(scene, known, unknown)
        eventually(
            lambda: all(grown(scene, before, reason) for reason in reasons),
            f"{reasons} are counted",
        )
        failed = scene.counters()["bucket_read_failed"] - failed
        assert failed <= ROWS * len(known + unknown), "a get reads no row again and again"
    scene.learned(spare)
    assert scene.reads(spare[0]) == "hit", "packs are read as before"
    holds_no_more(scene, held)


def test_a_server_ends_while_its_store_does_not_answer(scene):
    """Calls under way have their own time-outs; nothing kills it."""
    with fault(scene, StoreFaults(hold=True)):
        server = bucket_server(scene.store.url, scene.through, "--drain-timeout-s", "1")
        with server, ChaosClient(server.endpoint, "tcp") as client:
            client.wait_until_ready()
            assert put(client, scene.new_prompt()) == "stored"
            os.kill(server.pid, signal.SIGTERM)
            eventually(lambda: not server.alive(), "it ends")


def endure(scene: Scene, known: list[range], unknown: list[range]) -> None:
    """Reads, lookups of packs that are there and unknown, and puts. A store that never answers
    keeps none of the lookups waiting."""
    client = scene.client
    gets = [client.get(MEDIUM, one) for one in known]
    scene.look_around(LOOKUPS, known)
    for one in unknown:
        states(client, one)
    new = scene.new_prompt()
    client.finish(client.lookup(MEDIUM, new, chain=chain_of(new)))
    assert client.finish(client.put(MEDIUM, new, chain=chain_of(new))) == "stored"
    assert {client.finish(get) for get in gets} <= {*READ}
    scene.look_around(LOOKUPS, known)
    assert client.finish(client.get(MEDIUM, new)) == "hit"


def grown(scene: Scene, before, reason: str) -> int:
    name = f"bucket_{reason}"
    return scene.counters()[name] - before[name]


def holds_no_more(scene: Scene, before: Held) -> None:
    """No thread, no connection beyond one for each of the bucket's threads, no memory beyond what
    is documented."""
    stats = scene.server.wait_until_at_rest()
    memory = stats.tiers["memory"]
    assert memory.used_bytes <= memory.budget_bytes
    after = held_by(scene.server)
    assert after.threads <= before.threads
    assert after.descriptors <= before.descriptors + NUM_THREADS + NUM_READERS
    assert after.resident_bytes <= before.resident_bytes + MOST_BESIDE_MEMORY
