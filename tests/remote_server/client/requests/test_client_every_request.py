"""Every kind of request a client makes: too late, refused, cut off. It ends alone, and is counted.
Over TCP; what puts and gets do over each transport is in `test_channel_conformance.py`.

`KINDS` is compared with the client and with the protocol: a new kind of request fails here until
it is in it.
"""

import inspect
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, get_args

import pytest
from client_helpers import NAMESPACE, block, empty_rows, hold_blocks, key, rows_of
from fake_server import PATIENCE_S, FakeServer, eventually
from fault_proxy import FaultProxy

from remote_server import protocol
from remote_server.client import GetOutcome, RemoteClient
from remote_server.client.results import Op
from remote_server.errors import DeadlineExceeded, RequestRefused, ServerUnavailable
from remote_server.protocol import (
    Clear,
    Get,
    Hello,
    Keep,
    Locate,
    Lookup,
    OpenLane,
    Put,
    Record,
    Release,
    Stats,
    Touch,
    Verify,
)

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures"]

KEYS = [key(1)]


@dataclass(frozen=True)
class Kind:
    """How a request is made, and its message."""

    begin: Callable[[RemoteClient, Any], "Future[Any] | None"]
    """No future: the client makes it by itself."""

    message: type
    deadline_s: float = 60.0


def _hello(client, _):
    client.declare("another", 4096)


def _verify(client, fake):
    """A block that comes out wrong."""
    fake.rules[Get] = lambda asked: (
        fake.send(asked, fake.summary_for(asked)),
        fake.send(asked, fake.blocks_for(asked, [0])[0], bytes(block(2))),
    )
    hold_blocks(fake, range(1, 2))
    got = client.get(NAMESPACE, KEYS, empty_rows(1), stall_s=60, timeout_s=60)
    assert got.result(PATIENCE_S).outcomes == [GetOutcome.CORRUPT]


KINDS = {
    Op.HELLO: Kind(_hello, Hello, deadline_s=1.0),
    Op.LOOKUP: Kind(lambda client, _: client.lookup(NAMESPACE, KEYS, timeout_s=60), Lookup),
    Op.LOCATE: Kind(lambda client, _: client.locate(KEYS, timeout_s=60), Locate),
    Op.RECORD: Kind(lambda client, _: client.record(timeout_s=60), Record),
    Op.TOUCH: Kind(lambda client, _: client.touch(NAMESPACE, KEYS, timeout_s=60), Touch),
    Op.STATS: Kind(lambda client, _: client.stats(timeout_s=60), Stats),
    Op.CLEAR: Kind(lambda client, _: client.clear(timeout_s=60), Clear),
    Op.KEEP: Kind(lambda client, _: client.keep(NAMESPACE, KEYS, timeout_s=60), Keep),
    Op.VERIFY: Kind(_verify, Verify, deadline_s=5.0),
    Op.PUT: Kind(
        lambda client, _: client.put(NAMESPACE, KEYS, rows_of(range(1)), timeout_s=60), Put
    ),
    Op.GET: Kind(
        lambda client, _: client.get(NAMESPACE, KEYS, empty_rows(1), stall_s=600, timeout_s=60), Get
    ),
}


def test_every_kind_of_request_is_here():
    assert [*KINDS] == [*Op]
    methods = {
        name
        for name, method in inspect.getmembers(RemoteClient, inspect.isfunction)
        if not name.startswith(("_", "send_"))
        and "Future" in str(inspect.signature(method).return_annotation)
    }
    assert methods == {*Op} - {Op.HELLO, Op.VERIFY}, "those two are made without being asked for"
    messages = {kind.message for kind in KINDS.values()}
    others = {Release, OpenLane}
    assert messages == {*get_args(protocol.Request)} - others, "no reply; of no caller"


@pytest.fixture(params=KINDS)
def op(request):
    return request.param


@pytest.fixture
def proxy(fake):
    with FaultProxy(fake.endpoint) as proxy:
        yield proxy


@pytest.fixture
def client(fake, proxy, make_client, clock):
    """Its time is `clock`'s."""
    return make_client(proxy.endpoint, clock=clock)


class Begun:
    """A request under way, beside another that waits for its answer."""

    def __init__(self, op, client, fake) -> None:
        self.op, self.kind, self.client, self.fake = op, KINDS[op], client, fake
        self.message = self.kind.message
        other = Touch if op is Op.STATS else Stats
        fake.silence(other)
        self.bystander = (
            client.touch(NAMESPACE, KEYS, timeout_s=1e6)
            if other is Touch
            else client.stats(timeout_s=1e6)
        )
        (self._bystander_asked,) = fake.wait_for(other)

    def begin(self, rule) -> None:
        """Make the request, which the server meets with `rule`, and return when it has come."""
        number = len(self.fake.all_asked(self.message))
        self.fake.rules[self.message] = rule
        self.future = self.kind.begin(self.client, self.fake)
        self.asked = self.fake.wait_for(self.message, number + 1)[number]

    def error(self) -> BaseException:
        error = self.future.exception(PATIENCE_S)
        return self.future.result().error if error is None else error

    def ended(self, kind: type[BaseException]) -> None:
        """It did, with that error, where a caller can see it."""
        if self.future is not None:
            assert isinstance(self.error(), kind)

    def bystander_is_answered(self) -> None:
        assert not self.bystander.done(), "it was ended by another request's end"
        self.fake.do(lambda: self.fake.answer(self._bystander_asked))
        assert self.bystander.exception(PATIENCE_S) is None


def works(client, fake, clock):
    """The same client, afterwards: it answers, and holds nothing."""
    fake.behave()

    def ready() -> bool:
        clock.advance(0.02)  # backoffs, and hellos sent again
        return client.ready

    eventually(ready, "the client is ready")
    (asked,) = hold_blocks(fake, range(3, 4))
    rows = empty_rows(1)
    got = client.get(NAMESPACE, [asked], rows, stall_s=60, timeout_s=60).result(PATIENCE_S)
    assert got.outcomes == [GetOutcome.HIT]
    assert rows[0] == block(3)
    assert client.touch(NAMESPACE, KEYS, timeout_s=60).result(PATIENCE_S) == 1
    client.check()
    cancelled = client.counters()["cancelled"]
    assert client.cancel_all(PATIENCE_S)
    assert client.counters()["cancelled"] == cancelled, "a request was still pending"
    assert client.queued_bytes == 0


def test_too_late_it_ends_alone_and_is_counted(op, client, fake, clock):
    begun = Begun(op, client, fake)
    begun.begin(lambda asked: None)
    client.check()  # the loop has had its turn: what was sent counts as sent
    clock.advance(begun.kind.deadline_s - 0.01)
    client.check()
    assert client.counters()[begun.op.timeouts] == 0
    clock.advance(0.02)
    eventually(lambda: client.counters()[begun.op.timeouts] == 1, "it is counted")
    begun.ended(DeadlineExceeded)
    assert client.counters()["put_resets"] == 0, "libzmq held no row: no reason to reconnect"
    begun.bystander_is_answered()
    fake.do(lambda: fake.answer(begun.asked))
    if op not in (Op.HELLO, Op.GET):  # no reply of theirs counts as late without blocks
        eventually(lambda: client.counters()["late_replies"] >= 1)
    works(client, fake, clock)
    timeouts = {op: client.counters()[op.timeouts] for op in Op}
    assert timeouts == {op: int(op is begun.op) for op in Op}


def test_refused_it_ends_alone_and_is_counted(op, client, fake, clock):
    begun = Begun(op, client, fake)
    begun.begin(fake.refuse("internal"))
    eventually(lambda: client.counters()["refused"] == 1, "it is counted")
    begun.ended(RequestRefused)
    begun.bystander_is_answered()
    works(client, fake, clock)
    assert client.counters()["refused"] == 1


def test_when_its_server_goes_away_it_ends_at_once(op, client, fake, proxy, clock):
    begun = Begun(op, client, fake)
    begun.begin(lambda asked: None)
    with FakeServer(epoch="epoch-2") as next_fake:
        proxy.target = next_fake.endpoint
        fake.close()
        eventually(lambda: client.counters()["disconnects"] >= 3, "it is counted")
        begun.ended(ServerUnavailable)
        works(client, next_fake, clock)
        assert client.counters()["server_restarts"] == 1
        client.close()
