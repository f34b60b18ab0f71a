"""The thread that runs turns: what happens when one of them, or the thread, goes wrong."""

import asyncio

import pytest

from benchmarks.storage_workload.backends.host.turns import Turn, TurnThread


@pytest.fixture
def woken():
    return []


@pytest.fixture
def thread(woken):
    thread = TurnThread("test", lambda: woken.append(1))
    thread.start()
    yield thread
    thread.stop()


async def test_a_turn_returns_to_who_asked_and_others_have_theirs_in_between(thread: TurnThread):
    order: list[str] = []
    begun: set[str] = set()

    def turn(name: str) -> Turn[str]:
        begun.add(name)
        while len(begun) < 2:
            yield True
        for number in range(3):
            order.append(f"{name}{number}")
            yield True
        return name

    assert await asyncio.gather(*(thread.submit(turn(name)) for name in "ab")) == ["a", "b"]
    assert [order.index(f"{name}{number}") // 2 for number in range(3) for name in "ab"] == [
        0, 0, 1, 1, 2, 2
    ]  # fmt: skip


async def test_who_cannot_go_on_is_asked_again_after_a_wake_once_the_owner_has_looked(
    thread: TurnThread, woken: list[int]
):
    looks_before: list[int] = []

    def waits() -> Turn[None]:
        while len(looks_before) < 4:
            looks_before.append(len(woken))
            yield False

    waiting = asyncio.create_task(thread.submit(waits()))
    while not waiting.done():
        thread.wake()
        await asyncio.sleep(0)
    assert looks_before == sorted({*looks_before}), "each time after another look"


async def test_an_error_of_the_thread_itself_reaches_all_who_wait_and_all_who_come():
    def broken() -> None:
        raise AssertionError("the books are wrong")

    thread = TurnThread("test", broken)

    def waits() -> Turn[None]:
        while True:
            yield False

    waiting = [asyncio.create_task(thread.submit(waits())) for _ in range(2)]
    await asyncio.sleep(0)
    thread.start()
    for task in waiting:
        with pytest.raises(AssertionError, match="books"):
            await asyncio.wait_for(task, 60)
    with pytest.raises(AssertionError, match="books"):
        await thread.call(lambda: 1)
    thread.stop()


async def test_stopping_ends_every_turn_where_it_is_and_gives_back_what_it_held():
    thread = TurnThread("test", lambda: None)
    held: list[str] = []

    def waits(name: str) -> Turn[None]:
        held.append(name)
        try:
            while True:
                yield name == "busy"
        finally:
            held.remove(name)

    thread.start()
    tasks = [asyncio.create_task(thread.submit(waits(name))) for name in ("busy", "parked")]
    while len(held) < 2:
        await asyncio.sleep(0)
    thread.stop()
    assert held == []
    for task in tasks:
        with pytest.raises(RuntimeError, match="closed"):
            await asyncio.wait_for(task, 60)
    with pytest.raises(RuntimeError, match="closed"):
        await thread.call(lambda: 1)
