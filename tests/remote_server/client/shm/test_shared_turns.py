"""A get over shared memory goes on by itself: nothing else has to happen for it to ask for more."""

from math import inf
from types import SimpleNamespace

from remote_server.client.loop import Loop


class _LoopThatOnlySteps(Loop):
    """Without a thread; nothing is late."""

    def __init__(self, *channels: object) -> None:
        self._clock = lambda: 0.0
        self.session = SimpleNamespace(wake_at=lambda: inf)
        self._use(*channels)
        self._awake = [*self.channels]


class _Steps:
    """A channel with this many steps of work."""

    connection, wake_at, has_more, releasing = None, inf, True, ()

    def __init__(self, left: int) -> None:
        self.left = left

    @property
    def can_step(self) -> bool:
        return self.left > 0

    def step(self) -> None:
        self.left -= 1


def test_copying_on_stops_where_a_lease_ends():
    """The rest of that turn releases it and asks for more; skipped, nothing would."""
    loop = _LoopThatOnlySteps(_Steps(2))
    assert [loop._step(), loop._step()] == [True, False]


def test_copying_on_waits_for_what_another_channel_has_to_send():
    loop = _LoopThatOnlySteps(_Steps(2), _Steps(0))
    assert not loop._step()
