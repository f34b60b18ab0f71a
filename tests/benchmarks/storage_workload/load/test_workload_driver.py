"""Who is served when: users wait for their answers, and the important ones are first."""

import asyncio
import itertools

import fake_time
import pytest

from benchmarks.storage_workload.backends.backend import WriteDone
from benchmarks.storage_workload.backends.emulated import EmulatedBackend, NullBackend
from benchmarks.storage_workload.figures.accounting import line_of_stuck
from benchmarks.storage_workload.figures.samples import Samples
from benchmarks.storage_workload.figures.summary import summarize
from benchmarks.storage_workload.load import arrivals
from benchmarks.storage_workload.load.driver import Driver, Pace
from benchmarks.storage_workload.load.slots import PrioritySlots
from benchmarks.storage_workload.traffic.entries import Blocks
from benchmarks.storage_workload.traffic.models import MODELS, BlockShape, shape_of
from benchmarks.storage_workload.traffic.requests import Workload

WORKLOAD = Workload(MODELS["tiny-1b"], 3)
SHAPE: BlockShape = shape_of(WORKLOAD.model, 64, 1 / 64)


class Watched(EmulatedBackend):
    """Remembers the most writes that were under way at once, and every key it was asked for."""

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__(bytes_per_s)
        self.now = self.most = 0
        self.written: list[bytes] = []

    async def write(self, blocks: Blocks) -> WriteDone:
        self.now += 1
        self.most = max(self.most, self.now)
        self.written += blocks.keys
        try:
            return await super().write(blocks)
        finally:
            self.now -= 1


def test_a_thousand_who_wait_are_let_in_by_class_and_then_in_the_order_they_came():
    served: list[tuple[int, int]] = []

    async def run() -> None:
        slots = PrioritySlots(1)

        async def one(priority: int, number: int) -> None:
            async with slots.take(priority):
                served.append((priority, number))

        async with slots.take(9):
            tasks = [asyncio.create_task(one(1 + n % 3, n)) for n in range(1000)]
            await asyncio.sleep(0)
            assert slots.num_waiting == 1000
        await asyncio.gather(*tasks)

    fake_time.run(run())
    assert served == sorted(served, key=lambda each: (-each[0], each[1]))


def test_a_slot_whose_next_owner_is_gone_goes_to_the_one_after_it():
    async def run() -> None:
        slots, entered = PrioritySlots(1), []

        async def one(name: str) -> None:
            async with slots.take(1):
                entered.append(name)

        async with slots.take(1):
            gone, left = (asyncio.create_task(one(name)) for name in ("gone", "left"))
            await asyncio.sleep(0)
        gone.cancel()  # it has been given the slot and has not run yet
        await left
        assert entered == ["left"]
        await one("after")

    fake_time.run(run())


async def users(backend: NullBackend, count: int, seconds: float, pace: Pace) -> Driver:
    driver = Driver(WORKLOAD, backend, SHAPE, pace)
    await driver.run_users(count, seconds)
    return driver


def test_a_user_sends_nothing_before_it_has_its_answer_and_has_thought():
    driver = fake_time.run(users(EmulatedBackend(1e7), 5, 60.0, Pace(0.01)))
    by_user: dict[int, list] = {}
    for sample in driver.samples.requests:
        by_user.setdefault(sample.user, []).append(sample)
    assert len(by_user) == 5
    for user, samples in by_user.items():
        planned = itertools.islice(WORKLOAD.requests_of(user), len(samples))
        for before, sample, request in zip([None, *samples], samples, planned, strict=False):
            assert sample.number == request.number, "in the planned order, none left out"
            assert sample.generation_tokens == request.generation_tokens
            ready = before.ended_s if before is not None else 0.0
            assert abs(sample.arrived_s - ready - request.think_s) < 1e-6
    latency = driver.samples.requests[0]
    parts = latency.queue_s + latency.storage_s + latency.generation_s
    assert abs(latency.total_s - parts) < 1e-9


def test_an_open_overload_waits_in_the_queue_and_is_called_that():
    async def run() -> Samples:
        driver = Driver(WORKLOAD, EmulatedBackend(5e6), SHAPE, Pace(max_workers=2))
        timed = arrivals.at_rate(arrivals.round_robin(WORKLOAD, 10), "fixed", 20.0, 1)
        await driver.run_arrivals(timed, 60.0)
        return driver.samples

    samples = fake_time.run(run())
    assert summarize(samples)["dominates"]["component"] == "queue"
    assert samples.num_unfinished > 100, "arrivals wait for nobody"
    assert {round(r.arrived_s * 20, 6) % 1 for r in samples.requests} == {0.0}


def test_writes_at_a_time_are_bounded():
    backend = Watched(1e6)
    fake_time.run(users(backend, 20, 20.0, Pace(max_allocations=3)))
    assert backend.most == 3
    backend = Watched(1e6)
    fake_time.run(users(backend, 20, 20.0, Pace()))
    assert backend.most > 3


def test_a_user_ends_after_the_requests_it_may_send_and_the_run_with_the_last():
    driver = fake_time.run(users(EmulatedBackend(1e8), 4, 1e6, Pace(max_requests=7)))
    assert sorted((r.user, r.number) for r in driver.samples.requests) == [
        (user, number) for user in range(4) for number in range(7)
    ]
    assert driver.samples.elapsed_s < 1000 and driver.samples.num_unfinished == 0


def test_users_who_leave_finish_what_they_wait_for_and_go_on_there_when_they_come_back():
    async def run() -> Driver:
        driver = Driver(WORKLOAD, EmulatedBackend(1e8), SHAPE, Pace(0.01))

        def come_back() -> None:
            assert driver.num_active == 2
            driver.set_users(6)

        loop = asyncio.get_running_loop()
        loop.call_later(20, driver.set_users, 2)
        loop.call_later(40, come_back)
        await driver.run_users(6, 60.0)
        return driver

    samples = fake_time.run(run()).samples
    for user in range(6):
        assert [r.number for r in samples.requests if r.user == user] == [
            *range(sum(r.user == user for r in samples.requests))
        ]
    assert not [r for r in samples.requests if r.user == 5 and 32 < r.ended_s < 40]
    assert {m.users for m in samples.moments if 32 < m.time_s < 40} == {2}
    assert [r for r in samples.requests if r.user == 5 and r.ended_s > 41]


def test_a_system_prompt_is_missed_once_by_all_users_together_and_hit_ever_after():
    workload = WORKLOAD._replace(multi_turn=False)

    async def run() -> Samples:
        driver = Driver(workload, EmulatedBackend(1e12), SHAPE, Pace())
        await driver.run_users(1, 400.0)
        return driver.samples

    samples = fake_time.run(run())
    begun = [r for r in samples.requests if r.system_asked]
    sizes = {r.system_asked for r in begun}
    assert len(begun) > 20 and len(sizes) == 3
    for size in sizes:
        hits = [r.system_hit for r in begun if r.system_asked == size]
        assert hits == [0] + [size] * (len(hits) - 1)
    stats = summarize(samples)["prefix_cache_stats"]
    assert (stats["prefix_misses"], stats["prefix_hits"]) == (3, len(begun) - 3)


def test_the_end_cuts_off_who_waits_and_keeps_what_was_answered():
    async def run() -> Driver:
        driver = Driver(WORKLOAD, EmulatedBackend(1e8), SHAPE, Pace(0.03))
        asyncio.get_running_loop().call_later(12.0, driver.stop)
        await driver.run_users(10, 1e6)
        return driver

    driver = fake_time.run(run())
    samples = driver.samples
    assert abs(samples.elapsed_s - 12.0) < 0.01
    assert samples.requests and samples.num_unfinished
    assert all(r.ended_s <= 12.0 for r in samples.requests)
    assert samples.moments[-1].requests == len(samples.requests)


def test_requests_that_the_store_never_answers_are_counted_and_named():
    class Silent(NullBackend):
        async def write(self, blocks: Blocks) -> WriteDone:
            await asyncio.get_running_loop().create_future()
            raise AssertionError("no test ends the future")

    async def run() -> None:
        driver = Driver(WORKLOAD, Silent(), SHAPE, Pace(think_scale=0))
        await driver.run_users(3, 10.0)
        assert driver.num_stuck == 3
        line = line_of_stuck(driver.num_stuck)
        assert not line.agrees and "did not answer" in line.what

    fake_time.run(run())


def test_an_error_of_the_store_ends_the_run_and_is_not_swallowed():
    class Broken(NullBackend):
        async def write(self, blocks: Blocks) -> WriteDone:
            raise OSError("the device is gone")

    with pytest.raises(OSError, match="gone"):
        fake_time.run(users(Broken(), 3, 10.0, Pace()))
