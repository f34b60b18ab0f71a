"""TLS of the lanes in Python, by its module `ssl`."""

import errno
import os
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from socket import socket
from typing import Any

from remote_server.certificate import Certificate
from remote_server.errors import TlsFailed, WrongCertificate
from remote_server.native.tls_base import TlsConnection, TlsContext

_WAITS = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


@contextmanager
def _errors_of_sockets() -> Iterator[None]:
    """The numbers of other errors of `ssl` are not those of the system."""
    try:
        yield
    except _WAITS:
        raise BlockingIOError from None
    except ssl.SSLEOFError:
        raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)) from None
    except ssl.SSLError as error:
        raise OSError(errno.EPROTO, f"{error}") from None


class _Socket(ssl.SSLSocket):
    """It raises what a socket raises."""

    def recv_into(self, *arguments: Any) -> int:
        with _errors_of_sockets():
            return super().recv_into(*arguments)

    def send(self, *arguments: Any) -> int:
        with _errors_of_sockets():
            return super().send(*arguments)


class ReferenceTls(TlsConnection):
    """A connection of `ssl`."""

    def __init__(self, connection: _Socket, pin: bytes) -> None:
        self._socket: _Socket | None = connection
        self._pin = pin

    def fileno(self) -> int:
        return -1 if self._socket is None else self._socket.fileno()

    def handshake(self) -> None:
        assert self._socket is not None
        try:
            self._socket.do_handshake()
        except _WAITS:
            raise BlockingIOError from None
        except ssl.SSLError as error:
            raise TlsFailed(f"TLS failed: {error.reason or error}") from None
        shown = self._socket.getpeercert(binary_form=True)
        if self._pin and (not shown or sha256(shown).digest() != self._pin):
            raise WrongCertificate

    def recv(self, size: int) -> bytes:
        assert self._socket is not None
        data = bytearray(size)
        return bytes(data[: self._socket.recv_into(data)])

    def send(self, data: bytes) -> None:
        assert self._socket is not None
        self._socket.send(data)

    def take_over(self) -> tuple[socket, Callable[[], int]]:
        """Its socket, which is the caller's from now on, and the call that counts bytes that were
        decrypted and not read."""
        assert self._socket is not None
        connection, self._socket = self._socket, None
        return connection, connection.pending

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class ReferenceTlsContext(TlsContext):
    """A context of `ssl`."""

    def __init__(self, certificate: Certificate | None) -> None:
        """Of a server, or of clients without `certificate`. Raises `TlsFailed`."""
        kind = ssl.PROTOCOL_TLS_SERVER if certificate else ssl.PROTOCOL_TLS_CLIENT
        self._context = context = ssl.SSLContext(kind)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # the pin decides
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.sslsocket_class = _Socket
        self._is_server = certificate is not None
        if certificate:
            context.num_tickets = 0
            try:
                context.load_cert_chain(certificate.path)
            except OSError as error:
                raise TlsFailed(f"{certificate.path}: {error}") from None

    def wrap(self, connection: socket, pin: bytes = b"") -> ReferenceTls:
        with connection:
            connection.setblocking(False)
            connection.getpeername()  # of one that was reset, `ssl` would leave a file open
            wrapped = self._context.wrap_socket(
                connection, server_side=self._is_server, do_handshake_on_connect=False
            )
        assert isinstance(wrapped, _Socket)
        return ReferenceTls(wrapped, pin)
