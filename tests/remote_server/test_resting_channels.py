"""A channel with nothing to send, to receive or to end has no part of a turn."""

from collections import Counter
from functools import partial

import pytest
from client_helpers import NAMESPACE, empty_rows, key, rows_of
from fake_server import PATIENCE_S

from remote_server.client.channel import Channel
from remote_server.client.remote_client import RemoteClient

pytest_plugins = ["client_fixtures"]

PARTS = ("receive", "notice_changes", "expire", "pump")


@pytest.fixture
def parts(client: RemoteClient, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kind of channel has had a part of a turn, from now on."""
    had: Counter[str] = Counter()

    def count(channel: Channel, name: str, *given: object) -> None:
        had[type(channel).__name__] += 1
        getattr(type(channel), name)(channel, *given)

    for channel in client._loop.channels:
        for name in PARTS:
            monkeypatch.setattr(channel, name, partial(count, channel, name))
    return had


def test_a_lookup_is_the_business_of_the_control_channel_alone(client, parts):
    for number in range(20):
        client.lookup(NAMESPACE, [key(number)], timeout_s=PATIENCE_S).result(PATIENCE_S)
    assert parts.keys() == {"ControlChannel"}


@pytest.mark.parametrize("kind", ["TcpPuts", "TcpGets"])
def test_a_transfer_wakes_its_own_channel_until_it_has_ended(client, parts, kind):
    keys = [key(number) for number in range(3)]
    if kind == "TcpPuts":
        assert client.put(NAMESPACE, keys, rows_of(range(3))).result(PATIENCE_S).created == 3
    else:
        client.get(NAMESPACE, keys, empty_rows(3)).result(PATIENCE_S)
    assert {"ControlChannel", kind} <= parts.keys()
    assert not parts.keys() & ({"TcpPuts", "TcpGets"} - {kind}), "the other rests"
    client.lookup(NAMESPACE, [key(9)], timeout_s=PATIENCE_S).result(PATIENCE_S)
    before = parts[kind]
    for number in range(20):
        client.lookup(NAMESPACE, [key(number)], timeout_s=PATIENCE_S).result(PATIENCE_S)
    assert parts[kind] == before, "it rests again"
