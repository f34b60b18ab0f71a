"""Encrypted lanes: handshakes that fail, damaged records, bytes that epoll does not see."""

import errno
import os
import socket
import ssl
import time
from contextlib import closing, suppress

import pytest
from lane_helpers import Blocks, connected, random_blocks, reap, reaped
from lane_peer import frame
from mover_helpers import MAX_S, choose, is_readable
from tls_helpers import (
    a_certificate,
    secured_end,
    secured_ends,
    shake_hands,
    ssl_client,
    trusting_context,
    write_certificate,
)

from remote_server.certificate import Certificate
from remote_server.errors import ConfigError, TlsFailed, WrongCertificate
from remote_server.keys import read_certificate
from remote_server.native import make_lanes, make_tls_context, why_no_tls

pytest_plugins = ["engine_of_lanes_fixtures"]

pytestmark = [
    pytest.mark.real_time,
    pytest.mark.skipif(bool(why_no_tls()), reason=why_no_tls() or "none"),
]

MiB = 1 << 20


@pytest.fixture
def secured(lanes):
    """A lane, and a client of `ssl` at the far end."""
    near, far = secured_end(*connected())
    with far:
        yield lanes.open(near), far


def open_ends():
    near, far = connected()
    near.setblocking(False)
    far.setblocking(False)
    return near, far


def outcome(handshake) -> object:
    """Of one more step: None when it is complete."""
    try:
        return handshake()
    except (TlsFailed, OSError) as error:
        return error


# ── handshakes ───────────────────────────────────────────────────────────────────────────


def test_both_kinds_understand_each_other(monkeypatch):
    contexts = {}
    for kind in ("native", "python"):
        choose(kind, monkeypatch)
        contexts[kind] = make_tls_context(a_certificate()), make_tls_context()
    for server, client in (("native", "python"), ("python", "native")):
        near, far = open_ends()
        ends = (contexts[server][0].wrap(near), contexts[client][1].wrap(far, a_certificate().pin))
        shake_hands(*ends)
        for one, other in (ends, ends[::-1]):
            one.send(b"hello")
            assert is_readable(other, MAX_S)
            assert other.recv(100) == b"hello"
            with pytest.raises(BlockingIOError):
                other.recv(1)
        for end in ends:
            end.close()
            end.close()


def test_it_is_tls_1_3_without_tickets(engine):
    near, far = secured_end(*connected())
    near.send(b"x")
    assert far.recv(1) == b"x"
    assert far.version() == "TLSv1.3"
    assert not far.session.has_ticket
    near.close()
    far.close()


def test_a_client_sends_nothing_to_a_server_with_another_certificate(engine):
    near, far = open_ends()
    client = make_tls_context().wrap(near, a_certificate().pin)
    server = make_tls_context(a_certificate("another")).wrap(far)
    with pytest.raises(WrongCertificate):
        shake_hands(client, server)
    client.close()
    assert is_readable(server, MAX_S)
    found = outcome(server.handshake) or server.recv(100)
    assert found == b"" or isinstance(found, OSError)
    server.close()


def test_a_certificate_whose_key_the_server_lacks_is_refused(engine, tmp_path):
    """The SHA-256 of the right certificate is not enough: an attacker knows it too."""
    right, other = a_certificate(), write_certificate(tmp_path / "other.pem")
    mixed = Certificate("mixed", right.certificate, other.private_key)
    path = tmp_path / "mixed.pem"
    path.touch(0o600)
    path.write_text(
        ssl.DER_cert_to_PEM_cert(right.certificate)
        + (tmp_path / "other.pem").read_text().split("-----BEGIN CERT")[0]
    )
    with pytest.raises(TlsFailed):
        make_tls_context(mixed._replace(path=str(path)))


@pytest.mark.parametrize(
    "sent", [b"KVFL\1\0\0\0" + bytes(16), b"GET / HTTP/1.1\r\n\r\n", bytes(600)]
)
def test_a_plain_client_fails_the_handshake(engine, sent):
    near, far = open_ends()
    server = make_tls_context(a_certificate()).wrap(near)
    far.sendall(sent)
    assert is_readable(server, MAX_S)
    assert isinstance(outcome(server.handshake), TlsFailed)
    server.close()
    far.close()


def test_an_older_tls_is_refused(engine):
    near, far = open_ends()
    context = trusting_context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    client = context.wrap_socket(far, do_handshake_on_connect=False)
    server = make_tls_context(a_certificate()).wrap(near)
    with pytest.raises((TlsFailed, ssl.SSLError)):
        shake_hands(client, server)
    assert isinstance(outcome(server.handshake), (TlsFailed, OSError))
    server.close()
    client.close()


def test_a_handshake_may_come_byte_by_byte_and_end_at_every_byte(engine):
    first_near, first_far = open_ends()
    recorded = ssl_client(first_far)
    with pytest.raises(ssl.SSLWantReadError):
        recorded.do_handshake()
    assert is_readable(first_near, MAX_S)
    hello = first_near.recv(MiB)
    context = make_tls_context(a_certificate())
    for size in range(0, len(hello), 7):
        near, far = open_ends()
        server = context.wrap(near)
        far.sendall(hello[:size])
        far.shutdown(socket.SHUT_WR)
        until_ended = time.monotonic() + MAX_S
        while isinstance(error := outcome(server.handshake), BlockingIOError):
            assert time.monotonic() < until_ended
        assert isinstance(error, (TlsFailed, OSError)), size
        server.close()
        far.close()
    near, far = open_ends()
    server = context.wrap(near)
    for byte in hello:
        far.sendall(bytes([byte]))
        assert isinstance(outcome(server.handshake), BlockingIOError)
    assert is_readable(far, MAX_S)
    assert far.recv(1) == b"\x16", "the server answers"
    for end in (first_near, recorded, server, far):
        end.close()


# ── records ──────────────────────────────────────────────────────────────────────────────


def test_blocks_of_one_record_reach_jobs_that_come_later(lanes, secured):
    """Their bytes were decrypted with the first one, and the connection has no more."""
    lane, far = secured
    targets = [Blocks([5]) for _ in range(20)]
    far.sendall(b"".join(frame(number, 0, b"block") for number in range(20)))
    for number, target in enumerate(targets):
        job = target.receive(number)
        lanes.submit(lane, job)
        assert reaped(lanes, 1) == [job]
        assert target[0] == b"block"


def test_a_block_is_nowhere_in_clear(lanes, secured):
    lane, far = secured
    source = Blocks([160_000], b"secret!!" * 20_000)
    lanes.submit(lane, source.send())
    with socket.socket(fileno=os.dup(far.fileno())) as wire:
        wire.settimeout(MAX_S)
        seen = bytearray()
        while len(seen) < 160_000:
            seen += wire.recv(MiB)
    assert reaped(lanes, 1)
    assert b"secret" not in seen
    assert seen.startswith(b"\x17\x03\x03"), "records of application data"


@pytest.mark.parametrize("length", [400, 9000])
@pytest.mark.parametrize("place", [0, 3, 5, 20, 300, -1])
def test_a_damaged_record_breaks_the_lane_and_only_it(engine, place, length):
    """In between, a byte of a record is changed, or the rest of it is missing."""
    for cut in (False, True):
        with closing(make_lanes(2)) as lanes:
            near, middle = connected()
            far, other = connected()
            relay = Relay(middle, other)
            end, client = relay.secured(near, far)
            lane = lanes.open(end)
            loop = [lanes.open(one) for one in secured_ends(*connected())]
            target = Blocks([5, length])
            whole, broken = target.receive(1), Blocks([9]).receive(2)
            client.sendall(frame(1, 0, b"whole") + frame(1, 1, b"x" * length))
            record = relay.pull()
            lanes.submit(lane, whole)
            lanes.submit(lane, broken)
            near_side = record[:place] if cut else damaged(record, place)
            middle.sendall(near_side)
            if cut:
                middle.close()
            jobs, ended = reap(lanes, 2, 1)
            assert {*jobs} == {whole, broken}
            assert ended[0][0] == lane
            if not cut:
                assert ended[0][1] in (errno.EPROTO, errno.ECONNRESET)
            assert whole.intact() == broken.intact() * 2 == [False, False]
            assert [*target] == [bytes(5), bytes(length)], "nothing of it remains"
            again = random_blocks([9]), Blocks([9])
            lanes.submit(loop[0], again[0].send())
            lanes.submit(loop[1], again[1].receive())
            reaped(lanes, 2)
            assert again[0][0] == again[1][0]
            for one in (client, middle, other):
                one.close()


def damaged(record: bytes, place: int) -> bytes:
    changed = bytearray(record)
    changed[place] ^= 0x10
    return bytes(changed) + bytes(20_000)  # a length that grew is complete as well


class Relay:
    """Between the two ends of a connection, by hand."""

    def __init__(self, server_side: socket.socket, client_side: socket.socket) -> None:
        self.server_side, self.client_side = server_side, client_side

    def secured(self, near: socket.socket, far: socket.socket):
        near.setblocking(False)
        far.setblocking(False)
        server, client = make_tls_context(a_certificate()).wrap(near), ssl_client(far)
        self.server_side.setblocking(False)
        self.client_side.setblocking(False)
        left = {server: server.handshake, client: client.do_handshake}
        while left:
            for end, step in [*left.items()]:
                try:
                    step()
                    del left[end]
                except (BlockingIOError, ssl.SSLWantReadError):
                    pass
            for one, other in (
                (self.server_side, self.client_side), (self.client_side, self.server_side),
            ):  # fmt: skip
                with suppress(BlockingIOError):
                    other.sendall(one.recv(MiB))
        client.settimeout(MAX_S)
        self.server_side.settimeout(MAX_S)
        return server, client

    def pull(self) -> bytes:
        """What the client has sent."""
        assert is_readable(self.client_side, MAX_S)
        return self.client_side.recv(MiB)


def test_tls_of_the_other_kind_is_refused(monkeypatch):
    choose("native", monkeypatch)
    native = secured_end(*connected()), make_lanes(1)
    choose("python", monkeypatch)
    python = secured_end(*connected()), make_lanes(1)
    for (near, far), lanes in ((native[0], python[1]), (python[0], native[1])):
        with pytest.raises(TypeError, match="another kind"):
            lanes.open(near)
        near.close()
        far.close()
        lanes.close()


# ── files ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("part", ["CERTIFICATE", "PRIVATE KEY"])
def test_a_file_without_one_of_both_is_an_error_that_names_it(tmp_path, part):
    path = tmp_path / "server.pem"
    write_certificate(path)
    path.write_text(path.read_text().replace(f"BEGIN {part}", "BEGIN SOMETHING"))
    with pytest.raises(ConfigError, match=f"server.pem has no {part.lower()}"):
        read_certificate(str(path))
