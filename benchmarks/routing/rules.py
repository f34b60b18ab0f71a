"""Rules by which a router chooses the engine of a prompt.

A rule sees what a router can see: the prompt, its session, its engines as `examples.scorer` keeps
them, and what the servers answered. The router around it keeps the engines' queues.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, pairwise
from typing import Any, NamedTuple

from examples.scorer import Engine, choose
from remote_server.traces import Request

ROUND_ROBIN, STICKY, EVENTS, LOCATE = "round robin", "sticky sessions", "events", "locate"


class Prompt(NamedTuple):
    """One prompt, as a router gets it."""

    tokens: Sequence[Any]
    session: int


class Rule(ABC):
    """One way to choose."""

    asks_servers = False
    """Whether `readable` has to be what servers hold; it is 0 otherwise."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = engines

    @abstractmethod
    def choose(self, prompt: Prompt, readable: int) -> Engine:
        """The engine of this prompt, of which servers have the first `readable` tokens."""


class RoundRobin(Rule):
    """Each engine in turn."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        super().__init__(engines)
        self._turn = cycle(engines)

    def choose(self, prompt: Prompt, readable: int) -> Engine:
        return next(self._turn)


class Sticky(Rule):
    """All prompts of a session to one engine; a new session to the next in turn."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        super().__init__(engines)
        self._turn = cycle(engines)
        self._engine_of: dict[int, Engine] = {}

    def choose(self, prompt: Prompt, readable: int) -> Engine:
        engine = self._engine_of.get(prompt.session)
        if engine is None:
            engine = self._engine_of[prompt.session] = next(self._turn)
        return engine


class ByEvents(Rule):
    """By the engines' own events and their queues: what servers hold counts as not computed."""

    def choose(self, prompt: Prompt, readable: int) -> Engine:
        return choose(self.engines, prompt.tokens, 0)


class ByLocate(Rule):
    """The same, with what the servers hold."""

    asks_servers = True

    def choose(self, prompt: Prompt, readable: int) -> Engine:
        return choose(self.engines, prompt.tokens, readable)


RULES: Mapping[str, Callable[[Sequence[Engine]], Rule]] = {
    ROUND_ROBIN: RoundRobin, STICKY: Sticky, EVENTS: ByEvents, LOCATE: ByLocate,
}  # fmt: skip


MOST_CONTINUATIONS = 3
"""A prompt that goes on in more different ways is a beginning that sessions share."""


def sessions_of(requests: Sequence[Request]) -> list[int]:
    """The session of each request, which a trace does not name: a request goes on with the one
    whose whole prompt it begins with, the latest of several; any other opens a session."""
    follow: dict[int, set[int]] = {}
    for request in requests:
        for block, following in pairwise(request.blocks):
            follow.setdefault(block, set()).add(following)
    ends_at: dict[int, int] = {}
    sessions: list[int] = []
    for number, request in enumerate(requests):
        known = (ends_at[block] for block in reversed(request.blocks) if block in ends_at)
        sessions.append(next(known, number))
        if request.blocks:
            last = request.blocks[-1]
            if len(follow.get(last, ())) <= MOST_CONTINUATIONS:
                ends_at[last] = sessions[-1]
    return sessions
