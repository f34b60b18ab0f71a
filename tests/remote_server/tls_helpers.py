"""Certificates, and connections in TLS, for tests of lanes."""

import socket
import ssl
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from mover_helpers import MAX_S

from remote_server.certificate import Certificate, make_certificate
from remote_server.keys import read_certificate
from remote_server.native import TlsConnection, make_tls_context
from remote_server.native.reference_tls import _Socket


def write_certificate(path: Path) -> Certificate:
    path.touch(0o600)
    path.write_text(make_certificate())
    certificate = read_certificate(str(path))
    assert certificate is not None
    return certificate


@cache
def a_certificate(name: str = "server") -> Certificate:
    """One for each name, in a folder that lasts as long as the tests."""
    return write_certificate(Path(mkdtemp()) / f"{name}.pem")


def shake_hands(*ends: TlsConnection | ssl.SSLSocket) -> None:
    """Of both ends of one connection. Raises what either raises."""
    left = list(ends)
    while left:
        for end in [*left]:
            try:
                end.do_handshake() if isinstance(end, ssl.SSLSocket) else end.handshake()
            except (BlockingIOError, ssl.SSLWantReadError):
                continue
            left.remove(end)


def trusting_context() -> ssl.SSLContext:
    """Of a client that trusts everyone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def ssl_client(connection: socket.socket) -> ssl.SSLSocket:
    """A client of Python's `ssl` that trusts everyone, before its handshake."""
    context = trusting_context()
    context.sslsocket_class = _Socket
    return context.wrap_socket(connection, do_handshake_on_connect=False)


def secured_end(near: socket.socket, far: socket.socket) -> tuple[TlsConnection, ssl.SSLSocket]:
    """The ends of a connection: a server that may become a lane, and a client of `ssl`."""
    near.setblocking(False)
    far.setblocking(False)
    ends = make_tls_context(a_certificate()).wrap(near), ssl_client(far)
    shake_hands(*ends)
    ends[1].settimeout(MAX_S)
    return ends


def secured_ends(near: socket.socket, far: socket.socket) -> tuple[TlsConnection, TlsConnection]:
    """Both may become lanes; the first is the client."""
    near.setblocking(False)
    far.setblocking(False)
    certificate = a_certificate()
    ends = (
        make_tls_context().wrap(near, certificate.pin), make_tls_context(certificate).wrap(far)
    )  # fmt: skip
    shake_hands(*ends)
    return ends
