"""States of puts and gets: how many transfers are in each now, and a log line for abnormal ends."""

import logging
from collections.abc import Iterable
from enum import StrEnum

log = logging.getLogger(__name__)

InState = dict[str, int]
"""How many transfers of one kind are in each state now, by the state's name."""


def none_in(states: Iterable[StrEnum]) -> InState:
    """The count of each of `states` at the start."""
    return {state.value: 0 for state in states}


class Transfer:
    """One put or get. It is counted in its state from its first step until its end."""

    __slots__ = ("_in_state", "client", "request_id", "state")

    def __init__(self, client: bytes, request_id: int, state: StrEnum, in_state: InState) -> None:
        """`state` is the first one. `in_state` has an entry for each state but the ends."""
        self.client = client
        self.request_id = request_id
        self.state = state
        self._in_state = in_state

    def _begin(self) -> None:
        self._in_state[self.state] += 1

    def _enter(self, state: StrEnum) -> None:
        self._in_state[self.state] -= 1
        self._in_state[state] += 1
        self.state = state

    def _end(self, state: StrEnum, why: BaseException | str | None = None) -> None:
        """`state` is an end; abnormal if there is a reason, `why`."""
        self._in_state[self.state] -= 1
        if why is not None:
            log.debug(
                "%s %d of connection %s: %s, was %s: %s",
                type(self).__name__, self.request_id, self.client.hex(), state, self.state,
                str(why) or type(why).__name__,
            )  # fmt: skip
        self.state = state
