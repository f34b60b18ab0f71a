"""Opening of one lane: from the server's token to a connected socket, without a wait.

resolving (a name only) ──▶ connecting ──▶ handshake (TLS only) ──▶ greeting: preamble sent ──▶ open
"""

import errno
import os
import socket
import struct
from collections import deque
from collections.abc import Container
from threading import Thread
from typing import NamedTuple

from remote_server import protocol
from remote_server.client.connection.poll_set import PollSet
from remote_server.errors import KVFerryError, TlsFailed, WrongCertificate
from remote_server.native import TlsConnection, TlsContext, make_tls_context, why_no_tls
from remote_server.native.mover import library_or_reason

OPEN_S = 3.0
"""Limit of one attempt. The server closes a lane without a good token after two seconds."""

_MAGIC, _VERSION = b"KVFL", 1
_GREETING = struct.Struct("<4sI")
_UNDER_WAY = (errno.EINPROGRESS, errno.EAGAIN, errno.EINTR)


def why_slow() -> str:
    """Why lanes are no faster than ZeroMQ here; empty where they are."""
    library = library_or_reason()
    return f"they are slow without the C library ({library})" if isinstance(library, str) else ""


class LaneNotOpened(KVFerryError):
    """An attempt failed."""

    is_untrusted = False
    """The server showed another certificate than the right one."""


class Encryption:
    """The choice between plain and encrypted lanes: the server's, but never plain ones if the
    connection has keys."""

    def __init__(self, *, is_required: bool) -> None:
        self.is_required = is_required
        self._context: TlsContext | None = None

    @property
    def why_none(self) -> str:
        """Why there can be no lanes; empty if there can."""
        reason = why_no_tls() if self.is_required else ""
        return reason and f"the connection has keys, and they cannot be encrypted: {reason}"

    def context_for(self, opened: protocol.LaneOpened) -> TlsContext | None:
        """None for a plain lane. Raises `LaneNotOpened`."""
        if not opened.certificate:
            if self.is_required:
                raise LaneNotOpened("the server offers one that is not encrypted")
            return None
        if len(opened.certificate) != protocol.CERTIFICATE_BYTES:
            raise LaneNotOpened(f"a certificate is named by {len(opened.certificate)} bytes")
        if self._context is None:
            try:
                self._context = make_tls_context()
            except TlsFailed as error:
                raise LaneNotOpened(f"it cannot be encrypted: {error}") from None
        return self._context


class Address(NamedTuple):
    family: int
    where: tuple[str, int]


class LaneOpening:
    """One attempt. Used by the I/O thread only; a name is resolved on a thread of its own."""

    def __init__(
        self,
        opened: protocol.LaneOpened,
        peer_host: str,
        poll_set: PollSet,
        now: float,
        encryption: Encryption,
    ) -> None:
        """`peer_host` is the numeric address of the ZeroMQ connection's peer. Nothing is sent
        before the server has shown the certificate that `opened` names. Raises `LaneNotOpened` and
        `OSError`."""
        self.number = opened.number
        self.ends_at = now + OPEN_S
        self._token = opened.token
        self._poll_set = poll_set
        self._tls = encryption.context_for(opened)
        self._certificate = opened.certificate
        self._socket: socket.socket | TlsConnection | None = None
        self._connected = self._greeted = False
        self._reply = b""
        self._why = ""
        """Why the last address could not be reached."""
        self._host = opened.host or peer_host
        self._port = opened.port
        self._addresses: deque[Address] = deque()
        self._resolver: _Resolver | None = None
        try:
            self._addresses += resolve(self._host, self._port, socket.AI_NUMERICHOST)
        except OSError:
            self._resolver = _Resolver(self._host, self._port)
            poll_set.register(self._resolver.bell)

    def poll(self, now: float, readable: Container[object]) -> socket.socket | TlsConnection | None:
        """Do what is due, given the descriptors with an event. Returns the socket, which is the
        caller's then, once the server has accepted the lane. Raises `LaneNotOpened`, and `OSError`
        when the process cannot open another file."""
        if now >= self.ends_at:
            raise LaneNotOpened(f"{self._where} does not answer")
        if self._resolver is not None and self._resolver.bell in readable:
            self._addresses += self._resolver.result()
            self._end_resolver()
        if self._socket is not None and self._socket.fileno() in readable:
            if self._greeted:
                return self._read()
            if self._connected or self._connect_ended():
                self._greet()
        while self._socket is None and self._addresses:
            self._connect(self._addresses.popleft())
        if self._socket is None and self._resolver is None:
            raise LaneNotOpened(f"{self._where} cannot be reached{self._why}")
        return None

    def close(self) -> None:
        """End the attempt. Idempotent."""
        self._end_resolver()
        if self._socket is not None:
            self._poll_set.unregister(self._socket.fileno())
            self._socket.close()
            self._socket = None

    @property
    def _where(self) -> str:
        return f"port {self._port} of {self._host}"

    def _connect(self, address: Address) -> None:
        connection = socket.socket(address.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        failure = connection.connect_ex(address.where)
        if failure and failure not in _UNDER_WAY:
            connection.close()
            self._why = f": {os.strerror(failure)}"
            return
        self._socket = connection
        self._poll_set.register(connection.fileno(), writable=True)

    def _connect_ended(self) -> bool:
        """Whether there is a connection now, on which nothing has been sent."""
        assert isinstance(self._socket, socket.socket)
        failure = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        self._poll_set.unregister(self._socket.fileno())
        if failure:
            self._refused(failure)
            return False
        if self._tls is not None:
            connection, self._socket = self._socket, None
            self._socket = self._tls.wrap(connection, self._certificate)
        self._poll_set.register(self._socket.fileno())
        self._connected = True
        return True

    def _refused(self, failure: int) -> None:
        """Another address may do."""
        assert self._socket is not None
        self._socket.close()
        self._socket = None
        self._connected = False
        self._why = f": {os.strerror(failure)}"

    def _greet(self) -> None:
        """Send the preamble, once the handshake is complete. The buffer of a new connection has
        room for both."""
        assert self._socket is not None
        preamble = _GREETING.pack(_MAGIC, _VERSION) + self._token
        try:
            if isinstance(self._socket, TlsConnection):
                self._socket.handshake()
                self._socket.send(preamble)
            elif self._socket.send(preamble) != len(preamble):
                raise LaneNotOpened(f"{self._where} takes no bytes")
        except BlockingIOError:
            return
        except WrongCertificate as error:
            failed = LaneNotOpened(f"{self._where}: {error}")
            failed.is_untrusted = True
            raise failed from None
        except TlsFailed as error:
            raise LaneNotOpened(f"{self._where}: {error}") from None
        except OSError as error:
            self._poll_set.unregister(self._socket.fileno())
            self._refused(error.errno or errno.EIO)
        else:
            self._greeted = True

    def _read(self) -> socket.socket | TlsConnection | None:
        assert self._socket is not None
        try:
            some = self._socket.recv(_GREETING.size - len(self._reply))
        except BlockingIOError:
            return None
        except OSError as error:
            raise LaneNotOpened(f"{self._where}: {error.strerror}") from None
        if not some:
            raise LaneNotOpened(f"{self._where} closed the connection: the token was refused")
        self._reply += some
        if len(self._reply) < _GREETING.size:
            return None
        if self._reply == _GREETING.pack(_MAGIC, 0):
            raise LaneNotOpened(f"{self._where} has given its place to another client")
        if self._reply != _GREETING.pack(_MAGIC, self.number):
            raise LaneNotOpened(f"{self._where} is not the server's: it answered otherwise")
        connection, self._socket = self._socket, None
        self._poll_set.unregister(connection.fileno())
        return connection

    def _end_resolver(self) -> None:
        if self._resolver is not None:
            self._poll_set.unregister(self._resolver.bell)
            self._resolver.close()
            self._resolver = None


def resolve(host: str, port: int, flags: int = 0) -> list[Address]:
    """Raises `OSError`."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [Address(family, (str(where[0]), int(where[1]))) for family, _, _, _, where in found]


class _Resolver:
    """The addresses of a name. The thread lives as long as the system's resolver takes, also when
    the attempt has ended before."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._found: list[Address] = []
        self.bell, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        """Readable when the result is there."""
        Thread(target=self._run, args=(write_end,), name="kvferry-resolver", daemon=True).start()

    def _run(self, write_end: int) -> None:
        try:
            self._found = resolve(self._host, self._port)
        except OSError:
            pass
        finally:
            os.close(write_end)

    def result(self) -> list[Address]:
        """Empty for a name that is not known."""
        return self._found

    def close(self) -> None:
        os.close(self.bell)
