"""Requests cut into steps of two keys, and the steps of two clients mixed in every order: each is
answered once, the store's books are right after every step, and nothing is left behind."""

import types

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_fuzz_server import Conversation, converse, scripts

from remote_server import turns
from remote_server.protocol import Got
from remote_server.server.intake import serving
from remote_server.server.intake.serving import Serving
from remote_server.server.sending import outgoing
from remote_server.server.transfer import copier, put, streamed_get
from remote_server.server.zmq import get as zmq_get
from remote_server.store import gets

pytest_plugins = ["fuzzing"]

FEW = 2


@pytest.fixture(autouse=True)
def few_keys_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (turns, gets, copier, put, streamed_get, zmq_get):
        monkeypatch.setattr(module, "KEYS_PER_STEP", FEW)
    monkeypatch.setattr(gets, "LOOKUP_KEYS_PER_STEP", FEW)
    monkeypatch.setattr(outgoing, "MAX_SHARING", FEW)
    monkeypatch.setattr(serving, "TURN_S", 0.0)


class InTurns(Conversation):
    """What is received waits for its turn."""

    def __init__(self) -> None:
        self.serving: Serving | None = None
        super().__init__()
        self.serving = Serving(num_tenants=2)  # with one, small requests would not wait
        bench = self.bench
        self.tenant = types.SimpleNamespace(
            name="", send_queues=bench.send_queues, handlers=bench.handlers, store=bench.store
        )
        bench.replies._later = self.later
        turn = bench.turn

        def turn_of_all() -> None:
            self.step(1 << 20)
            turn()
            self.step(1 << 20)

        bench.turn = turn_of_all

    def later(self, client, rest) -> None:
        self.serving.go_on_later(self.tenant, client, rest)

    def hear(self, client: bytes, frames: list[bytes]) -> None:
        if self.serving is None:  # messages before the beginning
            super().hear(client, frames)
            return
        self.expect(client, frames)
        views = [memoryview(frame) for frame in frames]
        self.serving.take(self.tenant, client, views)

    def do(self, what: str, a: int) -> None:
        if what != "detach":  # its rows would be another's: what waits is refused, which is no news
            super().do(what, a)

    def step(self, number: int) -> None:
        """So many steps of the request whose turn it is."""
        bench = self.bench
        while number and self.serving.num_waiting:
            known = len(bench.send_queues.replies)
            self.serving.serve()
            bench.store.tier_stack.check()
            for _, reply in bench.send_queues.replies[known:]:
                if isinstance(reply, Got) and reply.lease is not None and reply.lease.number:
                    self.leases.append(reply.lease.number)
                    if len(self.asked[reply.request_id]) == 1:
                        self.check_lease(reply, reply.lease)
            number -= 1


@given(scripts, st.lists(st.integers(0, 3), min_size=30, max_size=30), st.booleans())
def converse_in_turns(script, numbers, leave):
    conversation = InTurns()
    converse(conversation, script, leave, numbers)
    assert conversation.serving.num_bytes == 0


def test_requests_in_steps_are_answered_once_and_leave_nothing_behind(fuzz):
    fuzz.run(converse_in_turns, examples=80)
