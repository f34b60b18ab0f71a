"""Prompts that wait for the engine fill the pool in turn, and none waits for ever."""

from unittest.mock import MagicMock

from kv_connector.pool.room import LOOKUPS_WITHOUT_PROGRESS, PoolRoom, Room

GRANTED, WAIT, NEVER = Room


class Pool(PoolRoom):
    """A room of a fixed size."""

    most_rows = 0

    def __init__(self, rows: int, wait_s: float) -> None:
        super().__init__(MagicMock())
        self.most_rows, self._wait_s = rows, wait_s

    def ask(
        self, name: str, rows: int, *, step: int, now_s: float = 0.0, is_slow: bool = False
    ) -> Room:
        wait_s = self._wait_s
        return self.take(name, rows, now_s=now_s, step=step, wait_s=wait_s, is_slow=is_slow)


def take(room: Pool, *requests: tuple[str, int], step: int, now_s: float = 0.0) -> list[Room]:
    return [room.ask(name, rows, now_s=now_s, step=step) for name, rows in requests]


def test_prompts_are_given_room_in_turn_as_far_as_it_goes():
    room = Pool(30, 1)
    assert take(room, ("a", 12), ("b", 12), ("c", 12), step=0) == [GRANTED, GRANTED, WAIT]
    room.release("a")
    assert take(room, ("b", 12), ("c", 12), step=1) == [GRANTED, GRANTED]
    assert room.num_held == 24


def test_a_long_prompt_is_not_overtaken_by_short_ones_behind_it():
    room = Pool(30, 1)
    take(room, ("a", 20), step=0)
    assert take(room, ("long", 25), ("short", 1), step=1) == [WAIT, WAIT]
    room.release("a")
    assert take(room, ("long", 25), ("short", 1), step=2) == [GRANTED, GRANTED]


def test_prompts_whose_loads_are_slow_never_keep_out_one_that_does_not():
    room = Pool(30, 1)
    slow = [room.ask(name, 8, step=0, is_slow=True) for name in ("a", "b", "c")]
    assert slow == [GRANTED, WAIT, WAIT], "half of the rows"
    assert take(room, ("quick", 10), ("another", 12), step=0) == [GRANTED, GRANTED]
    room.release("a")
    assert [room.ask(name, 8, step=1, is_slow=True) for name in ("b", "c")] == [GRANTED, WAIT]
    assert take(room, ("huge", 31), step=1) == [WAIT]


def test_a_slow_prompt_that_is_larger_than_its_share_is_alone_there():
    room = Pool(30, 1)
    assert room.ask("large", 20, step=0, is_slow=True) is GRANTED
    assert room.ask("next", 1, step=0, is_slow=True) is WAIT
    room.finished("large")
    assert room.ask("next", 1, step=1, is_slow=True) is GRANTED


def test_a_prompt_alone_always_has_room():
    assert take(Pool(30, 1), ("huge", 31), step=0) == [GRANTED]


def test_a_prompt_that_holds_room_is_given_more():
    room = Pool(30, 1)
    take(room, ("a", 15), ("b", 15), step=0)
    assert take(room, ("a", 16), ("b", 16), step=1) == [GRANTED, GRANTED]


def test_a_request_gives_up_when_nothing_becomes_free_for_longer_than_it_may_wait():
    room = Pool(10, 1.0)
    take(room, ("stuck", 10), step=0)
    answers = [
        room.ask("b", 5, now_s=0.25 * step, step=step)
        for step in range(1, LOOKUPS_WITHOUT_PROGRESS + 2)
    ]
    assert answers == [WAIT] * LOOKUPS_WITHOUT_PROGRESS + [NEVER]


def test_every_release_is_progress_also_one_that_is_too_small():
    room = Pool(10, 1.0)
    take(room, ("big", 8), ("small", 2), step=0)
    for step in range(1, 8):
        assert room.ask("b", 10, now_s=float(step), step=step) is WAIT
    room.release("small")
    for step in range(8, 16):
        assert room.ask("b", 10, now_s=float(step), step=step) is WAIT


def test_steps_in_which_the_engine_was_full_are_not_held_against_anyone():
    room = Pool(10, 1.0)
    take(room, ("running", 10), step=0)
    for step in range(5, 500, 5):
        assert room.ask("b", 5, now_s=float(step), step=step) is WAIT
