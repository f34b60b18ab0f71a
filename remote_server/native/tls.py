"""TLS in C, and the choice between it and the reference in Python."""

import ctypes
import errno
import os
from socket import socket
from weakref import finalize

from remote_server.certificate import Certificate
from remote_server.errors import TlsFailed, WrongCertificate
from remote_server.native.library import Library
from remote_server.native.mover import library_or_reason
from remote_server.native.tls_base import TlsConnection, TlsContext

PIN_BYTES = 32
"""Of a pin: a SHA-256."""


def why_no_tls() -> str:
    """Why lanes cannot be encrypted in this process; empty where they can be."""
    try:
        # Before OpenSSL is loaded: where Python has another one than the system, both use Python's.
        import ssl
    except ImportError as error:
        if not isinstance(library_or_reason(), Library):
            return f"Python has no TLS: {error}"
    else:
        if not ssl.HAS_TLSv1_3:
            return f"{ssl.OPENSSL_VERSION} has no TLS 1.3"
    library = library_or_reason()
    reason = library.tls_why_none() if isinstance(library, Library) else None
    return reason.decode() if reason else ""


def make_tls_context(certificate: Certificate | None = None) -> TlsContext:
    """The context of a server with `certificate`, or of a client without one; for lanes that
    `make_lanes` makes. Raises `TlsFailed`."""
    reason = why_no_tls()
    if reason:
        raise TlsFailed(reason)
    library = library_or_reason()
    if isinstance(library, Library):
        return NativeTlsContext(library, certificate)
    from remote_server.native.reference_tls import ReferenceTlsContext  # it imports `ssl`

    return ReferenceTlsContext(certificate)


class NativeTls(TlsConnection):
    """A connection of OpenSSL, as the lanes in C use it."""

    def __init__(self, library: Library, context: int, connection: socket, pin: bytes) -> None:
        """Takes `connection` over. Raises `OSError`."""
        self._library = library
        self._socket = connection
        address = library.tls_new(context, connection.fileno(), pin or None)
        if address is None:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        self.address = address
        self._free = finalize(self, library.tls_free, address)

    def fileno(self) -> int:
        return self._socket.fileno()

    def handshake(self) -> None:
        error = -self._library.tls_handshake(self.address)
        if error == errno.EKEYREJECTED:
            raise WrongCertificate
        if error == errno.EPROTO:
            raise TlsFailed("the peer does not speak TLS 1.3, or not rightly")
        _check(-error)

    def recv(self, size: int) -> bytes:
        memory = ctypes.create_string_buffer(size)
        count = self._library.tls_read(self.address, ctypes.addressof(memory), size)
        return memory.raw[: _check(count)]

    def send(self, data: bytes) -> None:
        _check(self._library.tls_write(self.address, data, len(data)))

    def detach(self) -> None:
        """Lanes have taken the connection over."""
        self._free.detach()
        self._socket.detach()

    def close(self) -> None:
        self._free()
        self._socket.close()


def _check(result: int) -> int:
    """`result`, unless it is an error. Raises `OSError`, which is the one of Python for EAGAIN."""
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result


class NativeTlsContext(TlsContext):
    """A context of OpenSSL."""

    def __init__(self, library: Library, certificate: Certificate | None) -> None:
        """Raises `TlsFailed`."""
        self._library = library
        der, key = (certificate.certificate, certificate.private_key) if certificate else (b"", b"")
        address = library.tls_context_new(der or None, len(der), key or None, len(key))
        if address is None:
            where = f"{certificate.path} has no certificate with its key" if certificate else ""
            raise TlsFailed(where or "OpenSSL does not offer TLS 1.3 here")
        self._address = address
        finalize(self, library.tls_context_free, address)

    def wrap(self, connection: socket, pin: bytes = b"") -> NativeTls:
        if pin and len(pin) != PIN_BYTES:
            raise ValueError(f"a pin of {len(pin)} bytes")
        try:
            return NativeTls(self._library, self._address, connection, pin)
        except OSError:
            connection.close()
            raise
