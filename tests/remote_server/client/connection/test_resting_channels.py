"""A channel with nothing to send, to receive or to end has no part of a turn."""

from collections import Counter
from functools import partial

import pytest
from client_helpers import NAMESPACE, empty_rows, key, rows_of
from fake_server import PATIENCE_S

from remote_server.client.connection.channel import Channel
from remote_server.client.remote_client import RemoteClient

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures"]

LOOKUPS = 50
# A channel that rests has a turn when its connection is made, when the welcome comes and after
# its last reply. The thread of the test may run before or after any of these.
MOST_AT_REST = 5


@pytest.fixture
def turns(client: RemoteClient, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The number of turns in which each kind of channel has had a part, from now on."""
    had: Counter[str] = Counter()

    def count(channel: Channel, *given: object) -> None:
        had[type(channel).__name__] += 1
        type(channel).pump(channel, *given)

    for channel in client._loop.channels:
        monkeypatch.setattr(channel, "pump", partial(count, channel))
    return had


def look_up(client: RemoteClient) -> None:
    for number in range(LOOKUPS):
        client.lookup(NAMESPACE, [key(number)], timeout_s=PATIENCE_S).result(PATIENCE_S)


def test_a_lookup_is_the_business_of_the_control_channel_alone(client, turns):
    look_up(client)
    assert turns.pop("ControlChannel") >= LOOKUPS
    assert all(number <= MOST_AT_REST for number in turns.values()), turns


@pytest.mark.parametrize("kind", ["ZmqPuts", "ZmqGets"])
def test_a_transfer_wakes_its_own_channel_until_it_has_ended(client, turns, kind):
    keys = [key(number) for number in range(3)]
    if kind == "ZmqPuts":
        assert client.put(NAMESPACE, keys, rows_of(range(3))).result(PATIENCE_S).created == 3
    else:
        client.get(NAMESPACE, keys, empty_rows(3)).result(PATIENCE_S)
    assert turns[kind] > 0
    before = turns[kind]
    look_up(client)
    assert turns[kind] - before <= MOST_AT_REST, "it rests again"
    (other,) = {"ZmqPuts", "ZmqGets"} - {kind}
    assert turns[other] <= MOST_AT_REST, "the other has rested all the time"
