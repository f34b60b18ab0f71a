"""A client that is given a server's name and a list's digest sends them, and keeps what it gets."""

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from client_helpers import (
    BLOCK_BYTES,
    NAMESPACE,
    Clock,
    assert_unavailable,
    empty_rows,
    hold_blocks,
    key,
    rows_of,
    turn,
)
from fake_server import PATIENCE_S, Asked, FakeServer, eventually

from remote_server import protocol
from remote_server.client import RemoteClient
from remote_server.errors import ConfigError, DeadlineExceeded
from remote_server.protocol import Error, ErrorCode, Get, Hello, Lookup, Put, ServerLoad

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures"]

FLEET = {"server_name": "kvferry-3", "fleet_digest": "0123456789abcdef"}
LOAD = ServerLoad(fill=700, evicted_age_s=12.5, up_s=60.0)

MakeClient = Callable[..., RemoteClient]


def answer_with(fake: FakeServer, kind: type, **fields: Any) -> None:
    """Answer requests of this kind honestly, with `fields` replaced in the first reply."""

    def rule(asked: Asked) -> None:
        (_, header, *rest), *others = fake.honest_answer(asked)
        reply = msgspec.structs.replace(protocol.decode_reply(header), **fields)
        fake.send_raw(asked, *protocol.encode(reply), *rest)
        for frames in others:
            fake.send_raw(asked, *frames)

    fake.rules[kind] = rule


@pytest.mark.parametrize("name", ["", "a"])
def test_a_client_without_a_list_asks_for_no_load(
    fake: FakeServer, make_client: MakeClient, name: str
):
    client = make_client(fake.endpoint, server_name=name)
    client.put(NAMESPACE, [key(0)], rows_of(range(1))).result(PATIENCE_S)
    client.get(NAMESPACE, [key(0)], empty_rows(1)).result(PATIENCE_S)
    assert client.lookup(NAMESPACE, [key(0)]).result(PATIENCE_S).load is client.load is None
    sent = [asked.message for asked in fake.asked]
    assert {type(message) for message in sent} >= {Hello, Put, Get, Lookup}
    assert fake.all_asked(Hello)[0].message.server == name
    assert not any(message.fleet for message in sent)
    assert not any(b"fleet" in protocol.encode(message)[1] for message in sent)


def test_requests_of_a_client_with_a_list_ask_for_load_and_hot_keys(
    transport: str, fake: FakeServer, make_client: MakeClient
):
    fake.near = transport == "shm"
    client = make_client(fake.endpoint, **FLEET)
    client.put(NAMESPACE, [key(0)], rows_of(range(1))).result(PATIENCE_S)
    client.get(NAMESPACE, [key(0)], empty_rows(1)).result(PATIENCE_S)
    client.lookup(NAMESPACE, [key(0)]).result(PATIENCE_S)
    sent = [one.message for one in fake.asked if isinstance(one.message, Put | Get | Lookup)]
    assert [type(message) for message in sent] == [Put, Get, Lookup]
    assert all(message.fleet for message in sent)
    assert all((message.shared is not None) == (transport == "shm") for message in sent[:2])


def test_the_load_is_the_one_that_came_last(fake: FakeServer, make_client: MakeClient):
    client = make_client(fake.endpoint, **FLEET)
    assert client.load is None
    for number, kind in enumerate([Lookup, Put, Hello]):
        load = msgspec.structs.replace(LOAD, fill=number)
        answer_with(fake, kind, load=load)
        if kind is Lookup:
            assert client.lookup(NAMESPACE, [key(0)]).result(PATIENCE_S).load == load
        elif kind is Put:
            client.put(NAMESPACE, [key(0)], rows_of(range(1))).result(PATIENCE_S)
        else:
            client.declare("another", BLOCK_BYTES)
            eventually(lambda: client.ready)
        assert client.load == load


def test_a_late_reply_has_news_of_the_load(fake: FakeServer, make_client: MakeClient, clock: Clock):
    client = make_client(fake.endpoint, clock=clock, **FLEET)
    fake.silence(Lookup)
    late = client.lookup(NAMESPACE, [key(0)])
    fake.wait_for(Lookup)
    turn(client)
    clock.advance(0.06)
    assert isinstance(late.exception(PATIENCE_S), DeadlineExceeded)
    (asked,) = fake.all_asked(Lookup)
    fake.do(lambda: fake.send(asked, protocol.Found(
        request_id=asked.message.request_id, epoch=fake.epoch, prefix=0, states=b"\0", load=LOAD,
    )))  # fmt: skip
    eventually(lambda: client.load == LOAD)


def test_hot_keys_are_indices_of_the_whole_get(fake: FakeServer, make_client: MakeClient):
    hold_blocks(fake, range(6))
    client = make_client(fake.endpoint, **FLEET, batch_bytes=2 * BLOCK_BYTES)
    answer_with(fake, Get, hot=[1, 7])  # the second of each batch of two, and one that is not there
    keys = [key(number) for number in range(6)]
    done = client.get(NAMESPACE, keys, empty_rows(6)).result(PATIENCE_S)
    assert len(fake.all_asked(Get)) == 3
    assert done.landed == [*range(6)] and done.hot == [1, 3, 5]


def refuse_the_name(fake: FakeServer) -> None:
    def refuse(asked: Asked) -> None:
        message = protocol.wrong_server("kvferry-4", asked.message.server)
        fake.send(asked, Error(
            request_id=asked.message.request_id, epoch=fake.epoch, protocol=2,
            code=ErrorCode.WRONG_SERVER, message=message,
        ))  # fmt: skip

    fake.rules[Hello] = refuse


def test_a_server_of_another_name_is_logged_once_and_not_used(
    fake: FakeServer, make_client: MakeClient, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING, "remote_server")
    refuse_the_name(fake)
    client = make_client(fake.endpoint, **FLEET, wait=False)
    client.declare("another", BLOCK_BYTES)
    hello, _ = fake.wait_for(Hello, number=2)
    assert (hello.message.server, hello.message.fleet) == ("kvferry-3", "0123456789abcdef")
    eventually(lambda: caplog.messages)
    assert_unavailable(client)
    assert not client.ready and not fake.all_asked(Lookup)
    assert caplog.messages == [
        f"{fake.endpoint}: this server has the name 'kvferry-4', and the client's list calls it "
        "'kvferry-3': correct the list, or start the server with --name kvferry-3; every block is "
        "a miss until then"
    ]
    fake.close()
    with FakeServer(fake.endpoint, epoch="epoch-2"):
        eventually(lambda: client.ready, "it is used once it has the right name")
    with pytest.raises(ConfigError, match="surrogates not allowed"):
        make_client(fake.endpoint, server_name="\ud800")
