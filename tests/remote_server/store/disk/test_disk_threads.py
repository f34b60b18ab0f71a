"""The threads that all tenants' disks share: who is served next, and who waits for whom."""

import threading

import pytest
from disk_helpers import BOUND_S, RealDisk, budget_for, wait_for
from fake_server import eventually
from gates import jobs_held
from tenancy import tenancy

from remote_server.store.io_threads import NUM_THREADS, Batch, Job, Priority, ThreadPool, Threads
from remote_server.values import MiB

pytestmark = pytest.mark.real_time

BLOCK = 8192
BATCHES = 20

assert tenancy


@pytest.fixture
def threads():
    threads = Threads(1)
    yield threads
    threads.stop()


def idle() -> None:
    """In the place of a loop that is woken."""


def test_each_tenant_has_its_turn_however_much_another_has_waiting(threads):
    greedy, modest = (ThreadPool(idle, threads=threads) for _ in range(2))
    ran: list[str] = []
    with jobs_held(greedy):
        for number in range(100):
            greedy.submit(Job(Priority.READ, lambda _, n=number: ran.append(f"g{n}"), print))
        for number in range(2):
            modest.submit(Job(Priority.READ, lambda _, n=number: ran.append(f"m{n}"), print))
    eventually(lambda: len(ran) == 102)
    assert ran[:5] == ["g0", "g1", "m0", "g2", "m1"] or ran[:5] == ["g0", "m0", "g1", "m1", "g2"]


def test_a_read_goes_before_a_write_of_whomever(threads):
    one, other = (ThreadPool(idle, threads=threads) for _ in range(2))
    ran: list[str] = []
    with jobs_held(one):
        one.submit(Job(Priority.CHORE, lambda _: ran.append("first"), print))
        eventually(lambda: threads._running)
        one.submit(Job(Priority.WRITE, lambda _: ran.append("write"), print))
        other.submit(Job(Priority.CHORE, lambda _: ran.append("chore"), print))
        other.submit(Job(Priority.READ, lambda _: ran.append("read"), print))
    eventually(lambda: len(ran) == 4)
    assert ran == ["first", "read", "write", "chore"]


def test_a_pool_that_stops_waits_for_its_own_job_and_leaves_the_threads_to_others(threads):
    one, other = (ThreadPool(idle, threads=threads) for _ in range(2))
    began, go_on = threading.Event(), threading.Event()
    ran: list[str] = []

    def work(_):
        began.set()
        go_on.wait(BOUND_S)
        ran.append("at hand")

    one.submit(Job(Priority.READ, work, print))
    one.submit(Job(Priority.READ, lambda _: ran.append("forgotten"), print))
    assert began.wait(BOUND_S)
    other.submit(Job(Priority.READ, lambda _: ran.append("another's"), print))
    stopped = threading.Thread(target=one.stop)
    stopped.start()
    assert stopped.is_alive()
    go_on.set()
    stopped.join(BOUND_S)
    assert ran[0] == "at hand"
    eventually(lambda: ran == ["at hand", "another's"])


def test_the_last_job_of_a_batch_wakes_the_loop_even_if_one_raises():
    """Any of four threads may have the last one."""
    woken = threading.Event()
    wakes, finished = [], []
    pool = ThreadPool(lambda: (wakes.append(None), woken.set()))

    def submit(number: int, batch: Batch, gate: threading.Event) -> None:
        def work(_):
            gate.wait(BOUND_S)
            return 1 // (number % 3)

        pool.submit(Job(Priority.READ, work, finished.append, batch))

    for _ in range(BATCHES):
        finished.clear()
        gate = threading.Event()
        batch = Batch(8)
        for number in range(8):
            submit(number, batch, gate)
        gate.set()
        while len(finished) < 8:  # a wake may be the second one of the batch before
            assert woken.wait(BOUND_S)
            woken.clear()
            pool.finish_jobs()
        assert sorted(map(str, finished)) == ["0"] * 2 + ["1"] * 3 + ["None"] * 3
    pool.stop()
    assert BATCHES <= len(wakes) <= BATCHES * NUM_THREADS


def test_a_read_in_several_pieces_wakes_the_loop_once(tmp_path):
    with RealDisk(tmp_path, *budget_for(4, 4, BLOCK), num_threads=1) as disk:
        keys = [b"%d" % number for number in range(12)]
        disk.put_all(keys, [bytes(BLOCK)] * 12)
        disk.drain()
        wakes, done = [], []
        wake = disk.pool.wake
        disk.pool.wake = lambda: (wakes.append(None), wake())
        blocks = disk.tier.pin_all("ns", keys)
        assert len({block.segment for block in blocks}) == 3
        disk.tier.read(blocks, [memoryview(bytearray(BLOCK)) for _ in keys], done.append)
        wait_for(disk.tier, disk.event, lambda: bool(done))
        assert done == [[True] * 12]
        assert len(wakes) == 1


def test_threads_do_not_grow_with_tenants(tenancy, tmp_path):
    tenancy.write(a='memory = "2MiB"\ndisk = "32MiB"', b='memory = "2MiB"\ndisk = "32MiB"')
    before = {thread.name for thread in threading.enumerate()}
    server = tenancy.start(disk=str(tmp_path / "disk"), disk_bytes=64 * MiB, populate=True)
    for name in "ab":
        peer = tenancy.peer(name)
        peer.hello()
        peer.put([1])
        peer.stats_once(lambda stats: stats.counters["disk_demoted"] == 1)
    names = [thread.name for thread in threading.enumerate() if thread.name not in before]
    assert sum(name.startswith("disk-") for name in names) == NUM_THREADS
    assert sum(name == "populate" for name in names) <= 1
    assert len({tenant.storage.disk.pool._threads for tenant in server.tenants.values()}) == 1
    tenancy.stop()
    assert not [one for one in threading.enumerate() if one.name.startswith("disk-")]
