"""A lookup's answer, and what the server learns from the lookup: which comes first."""

from collections.abc import Callable, Iterator
from threading import Event
from typing import Any

import pytest
from handler_bench import PATIENCE_S, Router
from wire_peer import Peer

from remote_server.protocol import Stretch
from remote_server.server.sending.outgoing import OutgoingMessage
from remote_server.server.sending.send_queue import SendQueues
from remote_server.server.server import Server
from remote_server.store.gets import SHORT_KEYS

pytestmark = pytest.mark.real_time

Learn = Callable[..., Iterator[None]]


class Gate:
    """Holds the loop in the first step of `learn`, until the test has the answer."""

    def __init__(self, learn: Learn) -> None:
        self.answered = Event()
        self.came_first: list[bool] = []
        self._learn = learn

    def __call__(self, *lookup: Any) -> Iterator[None]:
        self.came_first.append(self.answered.wait(PATIENCE_S))
        return self._learn(*lookup)


def learner_of(server: Server) -> Any:
    return server.store.memory.learner


def prompt(number: int) -> list[Stretch]:
    return [Stretch(number, 0, 0, 16)]


def test_a_short_lookup_is_answered_before_the_server_learns_from_it(server: Server, peer: Peer):
    peer.put(range(4))
    learner, follower = learner_of(server), server.store.tier_stack.follower
    gates = [Gate(learner.looked_up_in_steps), Gate(follower.looked_up)]
    learner.looked_up_in_steps, follower.looked_up = gates
    assert peer.lookup(range(8), chain=prompt(8)).prefix == 4
    for gate in gates:
        gate.answered.set()
    peer.stats()
    assert [gate.came_first for gate in gates] == [[True], [True]]


@pytest.mark.parametrize("chain", [prompt(SHORT_KEYS), [Stretch(4, n, 0, 16) for n in range(8)]])
def test_puts_that_follow_the_answer_to_a_long_lookup_find_what_was_learned(
    server: Server, peer: Peer, chain: list[Stretch]
):
    """The learner takes several steps, and puts may come on other connections between them."""
    order: list[str] = []
    learner, replies = learner_of(server), server.tenants[""].handlers._replies
    learn, post = learner.looked_up_in_steps, replies.post

    def learned(*lookup: Any) -> Iterator[None]:
        yield from learn(*lookup)
        order.append("learned")

    def posted(*reply: Any, **how: Any) -> None:
        order.append("answered")
        post(*reply, **how)

    learner.looked_up_in_steps, replies.post = learned, posted
    peer.lookup(range(sum(stretch.rows for stretch in chain)), chain=chain)
    assert order == ["learned", "answered"]


@pytest.mark.parametrize("num_keys", [8, 2 * SHORT_KEYS])
def test_a_fault_of_the_learner_is_counted_and_the_lookup_has_its_answer(
    server: Server, peer: Peer, num_keys: int
):
    peer.put(range(4))
    learner = learner_of(server)
    learn, learner.looked_up_in_steps = learner.looked_up_in_steps, iter(())
    assert peer.lookup(range(num_keys), chain=prompt(num_keys)).prefix == 4
    assert peer.stats().counters["internal_errors"] == 1
    learner.looked_up_in_steps = learn
    assert peer.lookup(range(num_keys), chain=prompt(num_keys)).prefix == 4


def test_an_answer_goes_first_only_where_nothing_is_before_it():
    """A client has its answers in order, also those that libzmq has refused for now."""
    router = Router()
    queues = SendQueues(router, lambda _: None)
    names = [bytes([number]) for number in range(4)]
    messages = [OutgoingMessage([b"", name]) for name in names]

    def sent() -> list[bytes]:
        return [frames[-1] for _, frames in router.sent]

    queues.post(b"client", messages[0], at_once=True)
    assert sent() == names[:1]
    router.full.add(b"client")
    queues.post(b"client", messages[1], at_once=True)
    router.full.clear()
    for message in messages[2:]:
        queues.post(b"client", message, at_once=True)
    assert sent() == names[:1]
    queues.send_some()
    assert sent() == names
