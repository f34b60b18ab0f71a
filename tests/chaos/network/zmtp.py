"""ZMTP 3 on the wire, as far as a proxy has to understand it: greeting, commands, messages.

A stream is cut into *units*, each a run of bytes that belong together: a piece of the greeting,
one command, or one whole message with all of its frames. The units of a stream, back to back,
are the stream.
"""

import socket
from dataclasses import dataclass
from enum import Enum, auto

import msgspec

GREETING_BYTES = 64
MORE, LONG, COMMAND = 1, 2, 4

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL" + bytes(16) + bytes(32)
READY = b"\x05READY" + b"\x0bSocket-Type" + b"\x00\x00\x00\x06DEALER" + b"\x08Identity" + bytes(4)

_header = msgspec.msgpack.Decoder(dict)


class Kind(Enum):
    GREETING = auto()
    COMMAND = auto()
    MESSAGE = auto()
    BLOCK = auto()
    PREAMBLE = auto()
    """These two are of a lane, which is no stream of ZMTP (`lane_wire.py`)."""


@dataclass(frozen=True, slots=True)
class Span:
    """The place of one frame in its unit: its flags and length, then its body."""

    start: int
    body: int
    end: int


@dataclass(frozen=True, slots=True)
class Unit:
    kind: Kind
    raw: bytes
    spans: tuple[Span, ...] = ()

    @property
    def bodies(self) -> list[bytes]:
        """What each frame carries."""
        return [self.raw[span.body : span.end] for span in self.spans]

    @property
    def type(self) -> str:
        """What the header of our protocol calls this message; empty when it cannot be read. A
        block of a lane is called "lane"."""
        if self.kind is Kind.BLOCK:
            return "lane"
        if self.kind is not Kind.MESSAGE or len(self.spans) < 2:
            return ""
        header = self.spans[1]
        try:
            return str(_header.decode(self.raw[header.body : header.end]).get("type", ""))
        except msgspec.DecodeError:
            return ""


def connected(endpoint: str, receive_bytes: int | None = None) -> socket.socket:
    """A TCP connection to a ROUTER, to which a DEALER's half of the handshake has been sent.

    `receive_bytes` limits what the kernel holds of the answers.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    peer = socket.socket()
    if receive_bytes is not None:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    peer.settimeout(60)
    peer.connect((host, int(port)))
    peer.sendall(GREETING + command_of(READY))
    return peer


def command_of(body: bytes) -> bytes:
    return bytes([COMMAND, len(body)]) + body


def message_of(bodies: list[bytes]) -> bytes:
    """The bytes of one message with these frames, as libzmq would send it."""
    last = len(bodies) - 1
    return b"".join(frame_of(body, more=at < last) for at, body in enumerate(bodies))


def frame_of(body: bytes, *, more: bool) -> bytes:
    flags = MORE if more else 0
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | LONG]) + len(body).to_bytes(8, "big") + body


def unit_of(bodies: list[bytes]) -> Unit:
    """The message with these frames, as a `Parser` has it."""
    (_, unit) = Parser().feed(bytes(GREETING_BYTES) + message_of(bodies))
    return unit


class Parser:
    """Cuts one direction of one connection into units."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._greeting_left = GREETING_BYTES
        self._spans: list[Span] = []
        self._at = 0  # where the next frame of the unit begins

    def feed(self, data: bytes) -> list[Unit]:
        """The units that `data` completes. The greeting is passed on as it comes: each side
        waits for the other in the middle of it."""
        units: list[Unit] = []
        if self._greeting_left:
            head = data[: self._greeting_left]
            self._greeting_left -= len(head)
            units.append(Unit(Kind.GREETING, bytes(head)))
            data = data[len(head) :]
        self._data += data
        while (unit := self._next()) is not None:
            units.append(unit)
        return units

    def _next(self) -> Unit | None:
        while (span := self._span()) is not None:
            self._spans.append(span)
            self._at = span.end
            flags = self._data[span.start]
            if flags & COMMAND or not flags & MORE:
                kind = Kind.COMMAND if flags & COMMAND else Kind.MESSAGE
                unit = Unit(kind, bytes(self._data[: span.end]), tuple(self._spans))
                del self._data[: span.end]
                self._spans, self._at = [], 0
                return unit
        return None

    def _span(self) -> Span | None:
        """The next frame, once all of it is here."""
        data, start = self._data, self._at
        if len(data) < start + 2:
            return None
        body, length = start + 2, data[start + 1]
        if data[start] & LONG:
            body = start + 9
            length = int.from_bytes(data[start + 1 : body], "big")
        if len(data) < body or len(data) < body + length:
            return None
        return Span(start, body, body + length)
