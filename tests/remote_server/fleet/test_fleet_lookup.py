"""Replies of several servers become one: the better of two wins, and silence is not absence."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from remote_server.client.cache_client import ABSENT_SO_FAR, UNANSWERED, UNANSWERED_LATE
from remote_server.errors import DeadlineExceeded, RequestRefused, ServerUnavailable
from remote_server.fleet.lookup import FleetLookup, Part
from remote_server.fleet.server import FleetServer, roomier
from remote_server.protocol import Found, KeyState, ServerLoad

ABSENT, PENDING, READABLE = KeyState.ABSENT, KeyState.PENDING, KeyState.READABLE
KEYS = [b"a", b"b", b"c", b"d"]
LATE = DeadlineExceeded("late")


@dataclass
class Client:
    queued_bytes: int = 0
    load: ServerLoad | None = None
    ready: bool = True


@dataclass
class Scene:
    """A lookup of `KEYS` at two servers, of which each is a home of all."""

    late: list[Found] = field(default_factory=list)
    learned: dict[str, list[bytes]] = field(default_factory=dict)
    forgotten: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.future: Future[Found] = Future()
        self.parts = [Part(server(name), 1.0) for name in ("one", "two")]
        for part in self.parts:
            part.indices, part.keys = [*range(len(KEYS))], KEYS
        self.merged = FleetLookup(
            self.future, KEYS, self.late.append,
            lambda server, keys: self.learned.__setitem__(server.name, keys),
            self.forgotten.extend,
        )  # fmt: skip
        self.merged.expects(self.parts)

    def answers(self, number: int, *states: int, remote: list[int] | None = None) -> None:
        self.merged.answered(self.parts[number], found(*states, remote=remote))

    @property
    def states(self) -> list[int]:
        return [*self.future.result(0).states]


def server(name: str, **client: object) -> FleetServer:
    return FleetServer(name, Client(**client), lambda: 0.0)


def found(*states: int, remote: list[int] | None = None) -> Found:
    return Found(request_id=1, epoch="e", prefix=0, states=bytes(states), remote=remote or [])


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_the_better_state_wins(scene: Scene):
    scene.answers(0, READABLE, ABSENT, PENDING, ABSENT)
    assert not scene.future.done(), "the other home may have more"
    scene.answers(1, ABSENT, READABLE, ABSENT, ABSENT)
    assert scene.states == [READABLE, READABLE, PENDING, ABSENT]
    assert scene.future.result(0).prefix == 2
    assert scene.learned == {"one": [b"a"], "two": [b"b"]}
    assert scene.forgotten == [b"d"]


def test_it_ends_when_every_key_is_readable_whoever_is_silent(scene: Scene):
    scene.answers(1, *[READABLE] * 4)
    assert scene.states == [READABLE] * 4
    scene.merged.failed(scene.parts[0], LATE)
    assert scene.late == [] and scene.learned == {"two": KEYS}


def test_a_key_in_memory_is_preferred_to_one_in_an_object_store(scene: Scene):
    scene.answers(0, *[READABLE] * 4, remote=[0, 3])
    assert not scene.future.done()
    scene.answers(1, READABLE, ABSENT, READABLE, ABSENT, remote=[2, 1])
    assert scene.states == [READABLE] * 4
    assert scene.future.result(0).remote == [1, 2], "the first and the last are in memory"
    assert scene.learned == {"one": [b"b", b"c", b"d"], "two": [b"a"]}


@pytest.mark.parametrize("error", [LATE, ServerUnavailable("lost")])
def test_a_silent_home_does_not_hide_what_the_other_has(scene: Scene, error: Exception):
    scene.merged.failed(scene.parts[0], error)
    scene.answers(1, READABLE, PENDING, READABLE, PENDING)
    assert scene.states == [READABLE, PENDING, READABLE, PENDING]


def test_what_one_home_lacks_may_still_come_from_one_that_is_late(scene: Scene):
    scene.merged.failed(scene.parts[0], LATE)
    scene.answers(1, READABLE, ABSENT, ABSENT, ABSENT)
    assert scene.states == [READABLE, *[UNANSWERED_LATE] * 3] and scene.forgotten == []
    scene.merged.late(scene.parts[0], found(ABSENT, READABLE, ABSENT, PENDING))
    (late,) = scene.late
    assert [*late.states] == [READABLE, READABLE, ABSENT, PENDING] and late.prefix == 2


def test_both_homes_may_be_late_and_the_first_reply_does_not_end_the_wait_for_the_other(
    scene: Scene,
):
    scene.parts[1].indices, scene.parts[1].keys = [1, 2, 3], KEYS[1:]
    third = Part(server("three"), 1.0)
    third.indices, third.keys = [0], KEYS[:1]
    scene.merged.expects([*scene.parts, third])
    for part in scene.parts:
        scene.merged.failed(part, LATE)
    scene.merged.answered(third, found(READABLE))
    assert scene.states == [READABLE, *[UNANSWERED_LATE] * 3]
    scene.merged.late(scene.parts[0], found(*[ABSENT] * 4))
    scene.merged.late(scene.parts[1], found(READABLE, ABSENT, ABSENT))
    first, second = scene.late
    assert [*first.states] == [READABLE, *[UNANSWERED_LATE] * 3]
    assert [*second.states] == [READABLE, READABLE, ABSENT, ABSENT]


def test_what_one_home_lacks_and_the_other_cannot_be_asked_for_is_absent_so_far(scene: Scene):
    """Whether the other one was lost before it was asked, or while it was."""
    scene.merged.expects(scene.parts, [range(2, 3)])
    scene.parts[1].indices, scene.parts[1].keys = [0, 1], KEYS[:2]
    scene.answers(0, ABSENT, READABLE, ABSENT, ABSENT)
    scene.merged.failed(scene.parts[1], ServerUnavailable("lost"))
    assert scene.states == [ABSENT_SO_FAR, READABLE, ABSENT_SO_FAR, ABSENT]
    assert scene.forgotten == [b"a", b"c", b"d"], "a get asks the home that can be asked"


@pytest.mark.parametrize(
    ("error", "state"), [(LATE, UNANSWERED_LATE), (ServerUnavailable("lost"), UNANSWERED)]
)
def test_a_key_whose_homes_are_silent_is_unanswered(error: Exception, state: int):
    scene = Scene()
    scene.parts[0].indices, scene.parts[0].keys = [0, 1], KEYS[:2]
    scene.parts[1].indices, scene.parts[1].keys = [2, 3], KEYS[2:]
    scene.merged.failed(scene.parts[0], error)
    scene.answers(1, ABSENT, READABLE)
    assert scene.states == [state, state, ABSENT, READABLE]
    assert scene.forgotten == [b"c"], "what was not answered is not absent"


def test_a_late_reply_before_the_end_is_part_of_the_result(scene: Scene):
    scene.merged.failed(scene.parts[0], LATE)
    scene.merged.late(scene.parts[0], found(READABLE, ABSENT, ABSENT, ABSENT))
    scene.answers(1, ABSENT, ABSENT, ABSENT, READABLE)
    assert scene.states == [READABLE, ABSENT, ABSENT, READABLE] and scene.late == []


@pytest.mark.parametrize(
    ("errors", "kind"),
    [
        ([ServerUnavailable("lost"), LATE], DeadlineExceeded),
        ([LATE, ServerUnavailable("lost")], DeadlineExceeded),
        ([RequestRefused("x", "no"), RequestRefused("x", "no")], RequestRefused),
        ([ServerUnavailable("lost"), ServerUnavailable("lost")], ServerUnavailable),
    ],
)
def test_it_fails_only_if_no_server_answered(errors: list[Exception], kind: type[Exception]):
    scene = Scene()
    for part, error in zip(scene.parts, errors, strict=True):
        scene.merged.failed(part, error)
    assert type(scene.future.exception(0)) is kind


def test_of_two_servers_that_have_a_run_the_less_busy_one_is_asked():
    for busy in (0, 1):
        scene = Scene()
        scene.parts[busy].server.client.queued_bytes = 1 << 20  # type: ignore[misc]
        scene.parts[0].indices, scene.parts[0].keys = [0, 1, 2], KEYS[:3]  # none of the two is done
        scene.answers(0, READABLE, READABLE, READABLE)
        scene.answers(1, READABLE, READABLE, READABLE, ABSENT)
        assert scene.learned == {("two", "one")[busy]: KEYS[:3]}


def load(fill: int, age_s: float, up_s: float = 1e6) -> ServerLoad:
    return ServerLoad(fill, age_s, up_s, False)


@pytest.mark.parametrize(
    ("first", "second", "chosen"),
    [
        (load(10, -1), load(500, -1), 0),
        (load(500, -1), load(10, -1), 1),
        (load(500, -1), load(500, -1), 0),
        (load(1000, 60), load(1000, 600), 1),
        (load(1000, 600), load(1000, 60), 0),
        (load(1000, 600), load(0, -1, up_s=0), 0),
        (load(1000, 600), load(0, -1, up_s=9 * 60), 0),
        (load(1000, 600), load(0, -1, up_s=10 * 60), 1),
        (load(1000, 100, up_s=300), load(900, -1, up_s=300), 1),
        (load(900, -1, up_s=300), load(1000, 100, up_s=300), 0),
        (None, None, 0),
    ],
)
def test_a_new_run_goes_to_the_roomier_home(
    first: ServerLoad | None, second: ServerLoad | None, chosen: int
):
    homes = server("one", load=first), server("two", load=second)
    assert roomier(*homes) is homes[chosen]


@pytest.mark.parametrize("change", [{"ready": False}, {"epoch": "second"}])
def test_a_server_that_comes_back_is_waited_for_though_its_lookups_were_late(
    change: dict[str, object],
):
    client: Any = SimpleNamespace(ready=True, epoch="first")
    server = FleetServer("kvferry-0", client, lambda: 100.0)
    assert server.can_be_looked_up()
    server.lookups.ended(in_time=False, sent_s=0.0)
    assert server.can_be_looked_up() and server.lookups.paused
    client.__dict__.update(change)
    assert server.can_be_looked_up() == client.ready
    client.ready = True
    assert server.can_be_looked_up() and not server.lookups.paused
