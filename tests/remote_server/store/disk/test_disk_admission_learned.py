"""What is written to a full disk when eviction learns: blocks that rank above some that are there.

Prompts of four blocks, with hints. Those that return have been seen to, so they rank higher.
"""

from collections.abc import Iterator, Mapping
from heapq import heappop, heappush
from pathlib import Path

import pytest
from disk_helpers import BLOCK, MemoryAboveDisk, budget_for

from remote_server.protocol import Hint, Stretch
from remote_server.store.eviction.learner import Learner
from remote_server.store.eviction.victims import Rule

ROWS = 4
IN_MEMORY, ON_DISK = 32, 32
RETURNS, DOES_NOT = Hint(True, 60.0), Hint(False)


class Learned(MemoryAboveDisk):
    """Memory above a disk of `ON_DISK` blocks, and one learner of both."""

    def __init__(self, folder: Path, rule: Rule) -> None:
        self.now = 0.0
        self.learner = Learner(lambda: self.now, rule)
        budget = budget_for(ON_DISK // 16, 16, BLOCK)
        super().__init__(folder, IN_MEMORY, *budget, learner=self.learner)
        self._teach()

    def _teach(self) -> None:
        """Every prompt that returns by its hint does so, after 4 to 128 s, twice; no other does."""
        due: list[tuple[float, int, int]] = []
        for number in range(1200):
            self.now += 2.0
            heappush(due, (self.now, number, 0 if number % 2 else 2))
            while due and due[0][0] <= self.now:
                _, prompt, turn = heappop(due)
                keys = [b"lesson %d %d" % (prompt, row) for row in range(10)]
                hint = RETURNS if turn < 2 else DOES_NOT
                self.learner.looked_up("lessons", keys, [Stretch(10, 0, 0, 16)], 0, hint)
                if turn < 2:
                    heappush(due, (self.now + 2.0 ** (2 + (prompt + turn) % 6), prompt, turn + 1))

    def keys(self, prompt: int) -> list[bytes]:
        return [b"%d of prompt %d" % (row, prompt) for row in range(ROWS)]

    def put(self, hint_of: Mapping[int, Hint]) -> None:
        """Requests with these hints for these prompts, of which nothing is there. Their blocks are
        offered to the disk together."""
        for prompt, hint in hint_of.items():
            self.now += 1.0
            self.learner.looked_up("ns", self.keys(prompt), [Stretch(ROWS, 0, 0, 16)], 0, hint)
        keys = [key for prompt in hint_of for key in self.keys(prompt)]
        chain = [Stretch(ROWS, 0, 0, 16) for _ in hint_of]
        self.write("ns", keys, [bytes(BLOCK)] * len(keys), chain)
        self.settle()

    def on_disk(self, *prompts: int) -> list[int]:
        """How many blocks of each prompt the disk has."""
        return [
            sum(self.disk.tier.peek("ns", key) is not None for key in self.keys(prompt))
            for prompt in prompts
        ]

    def counter(self, name: str) -> int:
        return self.tier_stack.counters()[f"disk_{name}"]


@pytest.fixture(params=[Rule.LEARNED])
def learned(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Learned]:
    made = Learned(tmp_path, request.param)
    yield made
    made.close()


def fill(learned: Learned) -> range:
    """The disk is full of prompts that return."""
    prompts = range(ON_DISK // ROWS)
    for prompt in prompts:
        learned.put({prompt: RETURNS})
    assert learned.on_disk(*prompts) == [ROWS] * len(prompts)
    assert learned.counter("evicted") == 0
    return prompts


def test_while_there_is_room_everything_is_written(learned):
    for prompt in range(ON_DISK // ROWS):
        learned.put({prompt: DOES_NOT})
    assert learned.counter("demoted") == ON_DISK
    assert learned.counter("declined_unlikely") == 0


def test_on_a_full_disk_what_ranks_below_all_that_is_there_is_not_written(learned):
    kept = fill(learned)
    learned.put({100: DOES_NOT})
    assert learned.on_disk(100, *kept) == [0, *[ROWS] * len(kept)]
    assert learned.counter("declined_unlikely") == learned.counter("demote_declined") == ROWS
    assert learned.memory.lookup_all("ns", learned.keys(100)) == bytes([2] * ROWS)
    learned.put({101: RETURNS})
    assert learned.on_disk(101) == [ROWS]
    assert learned.counter("evicted") == ROWS
    assert learned.counter("declined_unlikely") == ROWS


@pytest.mark.parametrize("learned", [Rule.LRU], indirect=True)
def test_where_lru_reigns_everything_is_written(learned):
    fill(learned)
    learned.put({100: DOES_NOT})
    assert learned.on_disk(100) == [ROWS]
    assert learned.counter("declined_unlikely") == 0


def test_a_prompt_that_is_declined_takes_none_beside_it_along(learned):
    fill(learned)
    learned.put({100: DOES_NOT, 101: DOES_NOT, 102: RETURNS, 103: DOES_NOT, 104: RETURNS})
    assert learned.on_disk(*range(100, 105)) == [0, 0, ROWS, 0, ROWS]
    assert learned.counter("declined_unlikely") == 3 * ROWS


def test_what_was_declined_is_offered_again_when_it_is_got_and_is_one_prompt_on_disk(learned):
    """This request has another hint. Its get names the last block first."""
    fill(learned)
    learned.put({100: DOES_NOT})
    learned.now += 2.0
    keys = learned.keys(100)
    learned.learner.looked_up("ns", keys, [Stretch(ROWS, 0, 0, 16)], ROWS, RETURNS)
    learned.tier_stack.asked_again("ns", keys[::-1])
    learned.settle()
    assert learned.on_disk(100) == [ROWS]
    segments = {id(learned.disk.tier.peek("ns", key).branch) for key in keys}
    assert len(segments) == 1
