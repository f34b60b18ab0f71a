"""Lanes of servers with keys: encrypted, or none and why; what is refused on their port."""

import logging
import socket
import ssl
from contextlib import suppress

import pytest
from lane_peer import LaneClock, WireLane, connected, encrypted, preamble, read
from tenancy import tenancy
from tls_helpers import trusting_context
from wire_peer import Peer

from remote_server.errors import ConfigError
from remote_server.keys import read_certificate
from remote_server.native import why_no_tls
from remote_server.server.lanes import offer as lane_offer
from remote_server.server.lanes.lanes import LANES_PER_CONNECTION
from remote_server.server.server import Server

pytest_plugins = ["lane_fixtures"]

pytestmark = [
    pytest.mark.real_time,
    pytest.mark.skipif(bool(why_no_tls()), reason=why_no_tls() or "none"),
]

assert tenancy


@pytest.fixture
def server(tenancy, lane_engine, lane_clock) -> Server:
    """With keys and lanes."""
    return tenancy.start(lane_clock, lanes="127.0.0.1:*")


@pytest.fixture
def peer(server, tenancy) -> Peer:
    peer = tenancy.peer("a")
    peer.hello()
    return peer


def counters(peer: Peer) -> dict[str, int]:
    return peer.stats().counters


def rest_of(connection: socket.socket) -> bytes:
    """What comes until the server has closed it."""
    data = b""
    with suppress(ConnectionResetError):
        while some := connection.recv(100):
            data += some
    return data


def test_a_server_with_keys_offers_encrypted_lanes_and_names_its_certificate(
    peer, tenancy, server, caplog
):
    assert peer.hello().max_lanes == LANES_PER_CONNECTION
    lane = WireLane(peer)
    made = read_certificate(str(tenancy.folder / "server.pem"))
    assert made is not None
    assert lane.opened.certificate == made.pin
    assert lane.put(range(5)).created == 5
    assert len(lane.get(range(7))[1]) == 5
    assert peer.stats().lanes.endswith("threads, encrypted")
    lane.close()
    peer.stats_once(lambda stats: stats.counters["lanes_ended_closed"] == 1)


def test_a_token_in_clear_opens_nothing_and_stays_good(peer):
    opened = WireLane.announce(peer)
    plain = connected(opened.port)
    plain.sendall(preamble(opened.token))
    assert rest_of(plain)[:1] in (b"", b"\x15"), "an alert of TLS at most"
    assert counters(peer)["lanes_refused_handshake"] == 1
    right = encrypted(connected(opened.port), opened.certificate)
    right.sendall(preamble(opened.token))
    assert read(right, 8) == b"KVFL" + opened.number.to_bytes(4, "little")
    right.close()


@pytest.mark.parametrize("sent", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01"])
def test_a_handshake_that_is_not_finished_is_closed_after_two_seconds(
    peer, sent, lane_clock: LaneClock
):
    lane = WireLane(peer)
    silent = connected(lane.opened.port)
    silent.sendall(sent)

    def time_passes(_: object) -> bool:
        lane_clock.now += 0.05
        return lane_clock.now > 1003.0

    peer.stats_once(time_passes)
    assert rest_of(silent) == b""
    assert counters(peer)["lanes_refused_unfinished"] == 1
    assert lane.put([1]).created == 1
    silent.close()


def client_hello() -> bytes:
    """The first message of a handshake."""
    output = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        trusting_context().wrap_bio(ssl.MemoryBIO(), output).do_handshake()
    return output.read()


@pytest.mark.parametrize("after", ["connect", "hello", "handshake", "part of the token"])
def test_a_reset_at_any_step_costs_only_that_connection(peer, after):
    lane = WireLane(peer)
    opened = WireLane.announce(peer)
    raw = connected(opened.port)
    if after == "hello":
        raw.sendall(client_hello())
    elif after != "connect":
        raw = encrypted(raw)
        if after != "handshake":
            raw.sendall(preamble(opened.token)[:20])
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    raw.close()
    refused = ("lanes_refused_handshake", "lanes_refused_preamble")
    peer.stats_once(lambda stats: sum(map(stats.counters.__getitem__, refused)) == 1)
    assert lane.put([1]).created == 1


def test_nonsense_in_tls_costs_only_its_lane(peer):
    lane, other = WireLane(peer), WireLane(peer)
    raw = lane.socket
    message, _ = lane.put_message([1])
    peer.send(message)
    with socket.socket(fileno=raw.detach()) as unwrapped:
        unwrapped.sendall(b"\x17\x03\x03\x00\x40" + bytes(64))
        assert lane.answer(message).created == 0
    peer.stats_once(lambda stats: stats.counters["lanes_ended_protocol"] == 1)
    assert other.put([2]).created == 1


# ── without ──────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def has_library(monkeypatch) -> None:
    """Where there is no C library, "auto" is no lanes, whatever TLS has."""
    monkeypatch.setattr(lane_offer, "library_or_reason", lambda: None)


@pytest.mark.usefixtures("has_library")
@pytest.mark.parametrize("lanes", ["auto", "127.0.0.1:*"])
@pytest.mark.parametrize("lacks", ["a certificate", "openssl"])
def test_without_what_tls_needs_there_are_none_and_the_log_names_it(
    tenancy, caplog, monkeypatch, lanes, lacks
):
    if lacks == "openssl":
        monkeypatch.setattr(lane_offer, "why_no_tls", lambda: "libssl.so.3 is missing")
    else:
        (tenancy.folder / "server.pem").unlink()
    with caplog.at_level(logging.INFO):
        server = tenancy.start(lanes=lanes)
    peer = tenancy.peer("a")
    assert peer.hello().max_lanes == 0
    (line,) = [one.getMessage() for one in caplog.records if "no lanes" in one.getMessage()]
    if lacks == "openssl":
        assert "libssl.so.3 is missing" in line
        assert "libssl.so.3 is missing" in peer.stats().lanes
    else:
        assert "`kvferry keys FOLDER` makes server.pem" in line
        assert str(tenancy.folder) not in str(server.lanes), "clients see it"


@pytest.mark.usefixtures("has_library")
@pytest.mark.parametrize("lanes", ["auto", "127.0.0.1:*"])
def test_a_certificate_that_cannot_be_used_is_an_error_that_names_the_file(tenancy, lanes):
    path = tenancy.folder / "server.pem"
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=r"server\.pem.*chmod 600"):
        Server(tenancy.config(lanes=lanes)).start()
    path.chmod(0o600)
    path.write_text(path.read_text().replace("M", "N", 2))
    with pytest.raises(ConfigError, match=r"server\.pem"):
        Server(tenancy.config(lanes=lanes)).start()


def test_with_lanes_off_the_certificate_is_not_read(tenancy):
    (tenancy.folder / "server.pem").write_text("nonsense")
    assert str(tenancy.start(lanes="off").lanes) == "none: off"
