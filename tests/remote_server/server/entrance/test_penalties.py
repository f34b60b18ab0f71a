"""How long senders wait whose connection was ended."""

from client_helpers import Clock

from remote_server.server.entrance import penalties
from remote_server.server.entrance.penalties import FORGOTTEN_S, LONGEST_WAIT_S, Penalties


def test_the_wait_doubles_up_to_a_bound_and_is_short_again_after_a_quiet_time():
    clock = Clock()
    of = Penalties(clock)
    waits = []
    for _ in range(12):
        waits.append(of.add("a"))
        assert of.holds("a") and not of.holds("b")
        clock.now += waits[-1]
        assert not of.holds("a")
    assert waits[:3] == [1, 2, 4] and waits[-1] == LONGEST_WAIT_S
    clock.now += FORGOTTEN_S
    assert of.add("a") == 1


def test_a_second_one_during_the_wait_makes_it_longer():
    clock = Clock()
    of = Penalties(clock)
    of.add("a")
    assert of.add("a") == 2
    clock.now += 1.5
    assert of.holds("a")


def test_no_more_senders_are_kept_than_a_bound(monkeypatch):
    monkeypatch.setattr(penalties, "MAX_SENDERS", 2)
    of = Penalties(Clock())
    for name in "aabc":
        of.add(name)
    assert [of.holds(name) for name in "abc"] == [False, True, True]
