"""The beginning of lanes: tokens, preambles, and connections that send neither."""

import socket

import msgspec
import pytest
from lane_peer import LaneClock, WireLane, connected, has_ended, has_ipv6, preamble, read
from lent import lent
from tenancy import tenancy
from wire_peer import Peer

from remote_server.errors import ConfigError
from remote_server.protocol import Error, LaneOpened, OpenLane
from remote_server.server.config import ServerConfig
from remote_server.server.lanes import listener as lane_listener
from remote_server.server.lanes.lanes import LANES_PER_CONNECTION
from remote_server.server.lanes.offer import num_threads
from remote_server.server.server import Server
from remote_server.values import MiB, lanes_address, lanes_beside

pytestmark = pytest.mark.real_time

pytest_plugins = ["lane_fixtures"]

assert tenancy


NO_LANE = b"KVFL" + bytes(4)


def is_refused(port: int, sent: bytes) -> bool:
    """Whether a connection that sends this is closed, and has no lane."""
    with connected(port) as connection:
        connection.sendall(sent)
        return has_ended(connection)


def loses_its_place(opened: LaneOpened) -> bool:
    """Whether a connection with that token is answered that it has no lane, and closed."""
    with connected(opened.port) as connection:
        connection.sendall(preamble(opened.token))
        return read(connection, len(NO_LANE)) == NO_LANE and has_ended(connection)


def counters(peer: Peer) -> dict[str, int]:
    return peer.stats().counters


def test_a_welcome_offers_lanes_and_each_has_a_number_of_its_own(lane_peer):
    assert lane_peer.hello().max_lanes == LANES_PER_CONNECTION
    lanes = [WireLane(lane_peer) for _ in range(3)]
    assert len({lane.number for lane in lanes}) == 3
    assert [lane.put([n]).created for n, lane in enumerate(lanes)] == [1, 1, 1]


def test_a_number_is_not_given_again_soon(lane_peer):
    first = WireLane(lane_peer)
    first.close()
    lane_peer.stats_once(lambda stats: stats.counters["lanes_ended_closed"] == 1)
    assert WireLane(lane_peer).number != first.number


# ── tokens ───────────────────────────────────────────────────────────────────────────────


def test_a_token_is_good_once(lane):
    assert loses_its_place(lane.opened)
    assert lane.put([1]).created == 1, "the lane itself goes on"
    assert counters(lane.peer)["lanes_refused_token"] == 1


def test_a_late_token_is_refused_and_its_place_is_free_again(lane_peer, lane_clock: LaneClock):
    late = [WireLane.announce(lane_peer) for _ in range(LANES_PER_CONNECTION)]
    assert lane_peer.ask(OpenLane(request_id=lane_peer.next_id())).code == "too_much_in_flight"
    lane_clock.now += 2.0
    assert loses_its_place(late[0])
    assert counters(lane_peer)["lane_tokens_late"] == LANES_PER_CONNECTION
    assert WireLane(lane_peer).put([1]).created == 1


def closes(opened: LaneOpened) -> None:
    """A client whose lane ends before its preamble is whole."""
    one = connected(opened.port)
    one.sendall(preamble(opened.token)[:-1])
    one.close()


def sends_another_token(opened: LaneOpened) -> None:
    assert loses_its_place(msgspec.structs.replace(opened, token=bytes(16)))


@pytest.mark.parametrize("fails", [closes, sends_another_token])
def test_a_lane_that_failed_to_open_has_its_place_for_two_seconds(lane_peer, lane_clock, fails):
    for _ in range(LANES_PER_CONNECTION):
        fails(WireLane.announce(lane_peer))
    lane_clock.now += 2.0
    opened = [WireLane(lane_peer) for _ in range(LANES_PER_CONNECTION)]
    assert [lane.put([n]).created for n, lane in enumerate(opened)] == [1] * len(opened)


def test_a_token_ends_with_the_connection_it_was_sent_to(lane_peer, lane_server, context):
    other = Peer(context, lane_server.endpoint)
    token = WireLane.announce(other)
    other.close()
    lane_peer.stats_once(lambda _: not lane_server.lanes._clients)
    assert loses_its_place(token)


# ── preambles ────────────────────────────────────────────────────────────────────────────


def test_a_wrong_byte_anywhere_in_a_preamble_costs_only_that_connection(lane):
    opened = WireLane.announce(lane.peer)
    for position in range(24):
        wrong = bytearray(preamble(opened.token))
        wrong[position] ^= 0x40
        if position < 8:
            assert is_refused(opened.port, wrong), position
        else:
            assert loses_its_place(msgspec.structs.replace(opened, token=bytes(wrong[8:])))
        assert lane.put([position]).created == 1
    refused = counters(lane.peer)
    assert (refused["lanes_refused_preamble"], refused["lanes_refused_token"]) == (8, 16)
    right = connected(opened.port)
    right.sendall(preamble(opened.token))
    assert read(right, 8)[:4] == b"KVFL", "its token is still good"


def test_a_preamble_that_ends_early_is_refused(lane):
    for number, length in enumerate([0, 1, 8, 23], start=1):
        early = connected(lane.opened.port)
        early.sendall(preamble(bytes(16))[:length])
        early.shutdown(socket.SHUT_WR)
        assert has_ended(early)
        assert counters(lane.peer)["lanes_refused_preamble"] == number


def test_a_preamble_may_come_byte_by_byte(lane_peer):
    opened = WireLane.announce(lane_peer)
    slow = connected(opened.port)
    slow.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in preamble(opened.token):
        slow.sendall(bytes([byte]))
        lane_peer.stats()  # the server has taken a turn
    assert read(slow, 8) == b"KVFL" + opened.number.to_bytes(4, "little")


def test_a_silent_connection_is_closed_after_two_seconds(lane, lane_clock: LaneClock):
    silent = connected(lane.opened.port)
    silent.sendall(b"KVFL")
    lane.peer.stats_once(lambda _: lane_clock_moves(lane_clock))
    assert has_ended(silent)
    assert counters(lane.peer)["lanes_refused_unfinished"] == 1
    assert lane.put([1]).created == 1


def lane_clock_moves(clock: LaneClock) -> bool:
    """Time passes only a little, until the connection has been accepted."""
    clock.now += 0.05
    return clock.now > 1003.0


def test_of_too_many_silent_connections_the_oldest_are_closed(lane, monkeypatch):
    silent = [connected(lane.opened.port) for _ in range(lane_listener.MAX_PENDING + 5)]
    lane.peer.stats_once(lambda stats: stats.counters["lanes_refused_unfinished"] == 5)
    assert all(map(has_ended, silent[:5]))
    assert WireLane(lane.peer).put([1]).created == 1, "a correct client is served meanwhile"
    for one in silent:
        one.close()


# ── limits and settings ──────────────────────────────────────────────────────────────────


def test_lanes_take_places_among_the_connections(start_lanes, context):
    server = start_lanes(max_connections=3)
    peer = Peer(context, server.endpoint)
    peer.hello()
    lanes = [WireLane(peer), WireLane(peer)]
    refused = peer.ask(OpenLane(request_id=peer.next_id()))
    assert isinstance(refused, Error)
    assert refused.code == "too_much_in_flight"
    lanes[0].close()
    peer.stats_once(lambda stats: stats.counters["lanes_ended_closed"] == 1)
    assert WireLane(peer).put([1]).created == 1


def test_unused_tokens_hold_no_place_that_another_connection_needs(start_lanes, context):
    """Two that used none of theirs, again and again, held all places: no lane was opened and no
    connection was let in."""
    server = start_lanes(max_connections=2 * (1 + LANES_PER_CONNECTION) + 1)
    idle = [Peer(context, server.endpoint) for _ in range(2)]
    tokens = [WireLane.announce(peer) for peer in idle for _ in range(LANES_PER_CONNECTION)]
    honest = Peer(context, server.endpoint)
    honest.hello()
    lanes = [WireLane(honest) for _ in range(2)]
    assert [lane.put([n]).created for n, lane in enumerate(lanes)] == [1, 1]
    other = Peer(context, server.endpoint)
    other.hello()
    assert counters(other)["lane_tokens_displaced"] == 3
    oldest_first = [tokens[0], tokens[LANES_PER_CONNECTION], tokens[1]]
    assert all(map(loses_its_place, oldest_first)), "of the one with most the oldest"
    assert not loses_its_place(tokens[2]), "the others are still good"
    assert counters(other)["peers_refused_connections"] == 0


def test_a_connection_that_asks_again_and_again_displaces_none_with_fewer_tokens(
    start_lanes, context
):
    server = start_lanes(max_connections=2 * (1 + LANES_PER_CONNECTION) + 1)
    greedy = [Peer(context, server.endpoint) for _ in range(2)]
    honest = Peer(context, server.endpoint)
    for peer in [*greedy, honest]:
        peer.hello()
    for peer in greedy:
        for _ in range(LANES_PER_CONNECTION):
            WireLane.announce(peer)
    slow = WireLane.announce(honest)
    for _ in range(5 * LANES_PER_CONNECTION):
        for peer in greedy:
            peer.ask(OpenLane(request_id=peer.next_id()))
    assert counters(honest)["lane_tokens_displaced"] > 5 * LANES_PER_CONNECTION
    assert not loses_its_place(slow)


def test_of_connections_with_equally_many_unused_tokens_none_displaces_another(
    start_lanes, context
):
    server = start_lanes(max_connections=4)
    slow, fast = Peer(context, server.endpoint), Peer(context, server.endpoint)
    tokens = [WireLane.announce(slow), WireLane.announce(fast)]
    assert fast.ask(OpenLane(request_id=fast.next_id())).code == "too_much_in_flight"
    assert not any(map(loses_its_place, tokens))


def test_a_server_without_lanes_offers_none_and_refuses_them(start_lanes, context):
    peer = Peer(context, start_lanes(lanes="off").endpoint)
    assert peer.hello().max_lanes == 0
    assert peer.ask(OpenLane(request_id=peer.next_id())).code == "bad_request"
    assert peer.stats().lanes == "none: off"


@pytest.mark.parametrize(
    ("memory", "max_inflight", "window"),
    [(64 * MiB, 0, 4 * MiB), (256 * MiB, 0, 16 * MiB), (256 * MiB, 4 * MiB, 4 * MiB)],
)
def test_a_welcome_offers_half_of_what_puts_have_room_for_and_gets_may_have(
    start_lanes, context, memory, max_inflight, window
):
    server = start_lanes(memory=memory, max_inflight=max_inflight, populate=False)
    assert Peer(context, server.endpoint).hello().lane_window_bytes == window


def test_with_auto_there_are_lanes_where_there_is_a_library(start_lanes, context, lane_engine):
    peer = Peer(context, start_lanes(lanes="auto").endpoint)
    welcome = peer.hello()
    if lane_engine == "native":
        assert welcome.max_lanes
        assert WireLane(peer).put([1]).created == 1
    else:
        assert welcome.max_lanes == 0
        assert "without the C library" in peer.stats().lanes


def test_an_address_that_is_taken_is_an_error_of_the_setting(start_lanes):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"lanes: {address}: Address already in use"):
            Server(ServerConfig(bind="tcp://127.0.0.1:*", lanes=address)).start()


@pytest.mark.parametrize(
    ("setting", "wrong"),
    [
        ("5759", "not an address"), ("host", "not an address"), (":5759", "not an address"),
        ("127.0.0.1:0", "not an address"), ("127.0.0.1:70000", "not an address"),
        ("::1:5759", "not an address"), ("10.0.0.7:5759", "other machines"),
        ("*:*", "other machines"),
    ],
)  # fmt: skip
def test_a_wrong_address_is_refused_by_its_name(setting, wrong):
    with pytest.raises(ConfigError, match=f"^lanes: .*{wrong}"):
        ServerConfig(lanes=setting)


def test_beside_keys_an_address_may_be_reached_from_other_machines():
    config = ServerConfig(lanes="10.0.0.7:5759", keys="server.key", tenants="tenants.toml")
    assert config.lanes == "10.0.0.7:5759"


def test_addresses_are_read():
    assert lanes_address("auto") is None
    assert tuple(lanes_address("[::1]:5759") or ()) == ("::1", 5759)
    assert tuple(lanes_address("*:*") or ()) == ("", 0)
    assert tuple(lanes_beside("tcp://10.0.0.7:5757")) == ("10.0.0.7", 0)
    assert tuple(lanes_beside("tcp://0.0.0.0:5757")) == ("0.0.0.0", 0)
    assert tuple(lanes_beside("tcp://[::1]:5757")) == ("::1", 0)


def test_threads_follow_the_cores():
    assert [num_threads(cores) for cores in (1, 2, 4, 8, 16, 64)] == [2, 2, 2, 4, 8, 8]


def test_lanes_over_ipv6_and_on_all_addresses(start_lanes, context):
    hosts = {"*:*": "", "0.0.0.0:*": "", "127.0.0.1:*": "127.0.0.1"}
    if has_ipv6():
        hosts |= {"[::1]:*": "::1", "[::]:*": ""}
    for lanes in hosts:
        peer = Peer(context, start_lanes(lanes=lanes, insecure=True).endpoint)
        opened = WireLane.announce(peer)
        assert opened.host == hosts[lanes]
        connection = lent(socket.create_connection((opened.host or "127.0.0.1", opened.port), 60))
        connection.sendall(preamble(opened.token))
        assert read(connection, 8)[:4] == b"KVFL"
