"""The interface of TLS on the connections of lanes, from the handshake until a lane takes over."""

from abc import ABC, abstractmethod
from socket import socket


class TlsConnection(ABC):
    """A connection that speaks TLS 1.3. It does not block: a call that must wait for the peer
    raises `BlockingIOError`, and is repeated when the connection is readable. One thread at a
    time."""

    @abstractmethod
    def fileno(self) -> int:
        """Negative once a lane has taken the connection over."""

    @abstractmethod
    def handshake(self) -> None:
        """Agree upon keys. A client compares the certificate of the server with the pinned one.

        Raises `TlsFailed`, `WrongCertificate`, and `OSError` when the connection has ended. Nothing
        may be sent then."""

    @abstractmethod
    def recv(self, size: int) -> bytes:
        """After the handshake, bytes that have come; none when the peer has closed the connection.
        Raises `OSError`."""

    @abstractmethod
    def send(self, data: bytes) -> None:
        """Send all of a few bytes after the handshake. Raises `OSError`."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection, unless a lane has it. Idempotent."""


class TlsContext(ABC):
    """What all connections of a server, or of a client, have in common."""

    @abstractmethod
    def wrap(self, connection: socket, pin: bytes = b"") -> TlsConnection:
        """TLS on `connection`, which is taken over. `pin`, of a client: the SHA-256 of the one
        certificate that it accepts. Raises `OSError`; the connection is closed then."""
