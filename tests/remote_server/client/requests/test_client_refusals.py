"""Refusals of the client and of the server: reported at once, with the reason, and counted."""

import pytest
from client_helpers import (
    BLOCK_BYTES,
    NAMESPACE,
    empty_rows,
    hold_blocks,
    key,
    rows_of,
)  # fmt: skip
from fake_server import PATIENCE_S

from remote_server import protocol
from remote_server.client import ClientConfig, GetOutcome, RemoteClient
from remote_server.errors import (
    ConfigError,
    LocalProtocolError,
    RequestRefused,
)  # fmt: skip
from remote_server.protocol import MAX_LANES, Get, Lookup, Put, PutOutcome

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures"]

HIT, MISS = GetOutcome.HIT, GetOutcome.MISS


def _strided():
    return memoryview(bytearray(BLOCK_BYTES))[::2]


BAD_GETS = {
    "an undeclared namespace": ("other", [key(1)], lambda: empty_rows(1)),
    "an empty key": (NAMESPACE, [b""], lambda: empty_rows(1)),
    "a key too long": (NAMESPACE, [b"x" * 129], lambda: empty_rows(1)),
    "a key of text": (NAMESPACE, ["text"], lambda: empty_rows(1)),
    "a row too many": (NAMESPACE, [key(1)], lambda: empty_rows(2)),
    "a row too large": (NAMESPACE, [key(1)], lambda: empty_rows(1, BLOCK_BYTES + 1)),
    "an empty row": (NAMESPACE, [key(1)], lambda: [memoryview(bytearray())]),
    "a row that is not contiguous": (NAMESPACE, [key(1)], lambda: [_strided()]),
    "a row that is no row": (NAMESPACE, [key(1)], lambda: [None]),
}


@pytest.mark.parametrize("case", BAD_GETS)
def test_what_the_protocol_forbids_is_not_sent(client, fake, case):
    namespace, keys, make_rows = BAD_GETS[case]
    got = client.get(namespace, keys, make_rows()).result(PATIENCE_S)
    assert isinstance(got.error, LocalProtocolError)
    assert got.outcomes == [GetOutcome.REFUSED] * len(keys)
    put = client.put(namespace, keys, make_rows()).result(PATIENCE_S)
    assert isinstance(put.error, LocalProtocolError)
    assert put.outcomes == [None] * len(keys)
    if "row" not in case:
        with pytest.raises(LocalProtocolError):
            client.lookup(namespace, keys).result(PATIENCE_S)
    assert not fake.all_asked(Get) + fake.all_asked(Put) + fake.all_asked(Lookup)
    assert client.counters()["local_errors"] >= 2


def test_a_row_that_cannot_be_written_is_refused_for_a_get_only(client):
    row = memoryview(bytes(BLOCK_BYTES))
    assert client.put(NAMESPACE, [key(1)], [row]).result(PATIENCE_S).created == 1
    got = client.get(NAMESPACE, [key(1)], [row]).result(PATIENCE_S)
    assert isinstance(got.error, LocalProtocolError)


def test_a_refused_batch_ends_its_request_without_sending_the_rest(fake, make_client):
    client = make_client(
        fake.endpoint, batch_bytes=BLOCK_BYTES, put_window_bytes=BLOCK_BYTES,
        get_window_bytes=BLOCK_BYTES,
    )  # fmt: skip
    keys = hold_blocks(fake, range(5))

    def refuse_second(kind):
        number = len(fake.all_asked(kind))
        return fake.answer if number == 1 else fake.refuse("internal")

    fake.rules[Get] = lambda asked: refuse_second(Get)(asked)
    fake.rules[Put] = lambda asked: refuse_second(Put)(asked)
    got = client.get(NAMESPACE, keys, empty_rows(5)).result(PATIENCE_S)
    assert got.outcomes == [HIT] + [GetOutcome.REFUSED] * 4
    put = client.put(NAMESPACE, keys, rows_of(range(5))).result(PATIENCE_S)
    assert put.outcomes == [PutOutcome.EXISTED, None, None, None, None]
    assert isinstance(put.error, RequestRefused)
    assert len(fake.all_asked(Get)) == len(fake.all_asked(Put)) == 2


def test_declined_blocks_are_counted_by_reason_over_all_batches(fake, make_client):
    client = make_client(fake.endpoint, batch_bytes=BLOCK_BYTES)
    fake.rules[Put] = lambda asked: fake.send(asked, fake.stored(asked, [PutOutcome.DECLINED]))
    put = client.put(NAMESPACE, [key(1), key(2)], rows_of(range(2))).result(PATIENCE_S)
    assert put.declined == {"no_slot": 2}
    assert put.outcomes == [PutOutcome.DECLINED] * 2
    assert put.error is None


def test_nothing_asked_is_answered_at_once(client, fake):
    assert client.lookup(NAMESPACE, []).result(PATIENCE_S).states == b""
    assert client.get(NAMESPACE, [], []).result(PATIENCE_S).outcomes == []
    assert client.put(NAMESPACE, [], []).result(PATIENCE_S).total == 0
    assert client.touch(NAMESPACE, []).result(PATIENCE_S) == 0
    assert {type(asked.message) for asked in fake.asked} == {protocol.Hello}


@pytest.mark.parametrize(
    "settings",
    [
        {"endpoint": "localhost"}, {"endpoint": "tcp://nowhere"}, {"endpoint": "tcp://a:b"},
        {"batch_bytes": 0}, {"hello_timeout_s": -1.0}, {"transport": "rdma"},
        {"lanes": -1}, {"lanes": MAX_LANES + 1},
        {"idle_close_s": 0}, {"idle_close_s": -1.0}, {"idle_close_s": float("nan")},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_settings_fail_at_the_door(settings):
    (name,) = settings
    with pytest.raises(ConfigError, match=name):
        RemoteClient(ClientConfig(**{"endpoint": "tcp://127.0.0.1:1", **settings}))


def test_impossible_declarations_fail_at_the_door(client):
    with pytest.raises(ConfigError, match="namespace"):
        client.declare("", 4096)
    with pytest.raises(ConfigError, match="block_bytes"):
        client.declare("large", protocol.MAX_FRAME_BYTES + 1)
