"""Lanes on the wire, as far as a proxy has to understand them: their address, and their blocks.

A lane passes by a proxy that forwards ZeroMQ alone: the server announces its own port. So a proxy
puts a port of its own in place of that one (`moved`), and cuts each direction of a lane into units
(`LaneParser`): pieces of the 24 or 8 bytes at its beginning, then whole blocks.
"""

import struct
from typing import NamedTuple

import msgspec
from zmtp import Kind, Span, Unit, unit_of

HEADER = struct.Struct("<QII")
"""Request, position of the block, and its length."""

TRAILER_BYTES = 8

PREAMBLE_BYTES, GREETING_BYTES = 24, 8
"""The first bytes of a client and of a server."""


class Announced(NamedTuple):
    """Where a server awaits a lane. An empty host is that of its ZeroMQ connection."""

    host: str
    port: int
    token: bytes


def moved(unit: Unit, port: int) -> tuple[Unit, Announced] | None:
    """The same message with the port of a proxy, beside whose ZeroMQ connection the lane is then,
    and where the lane is awaited. None for other messages."""
    if unit.type != "lane_opened":
        return None
    bodies = unit.bodies
    header = msgspec.msgpack.decode(bodies[1])
    announced = Announced(header["host"], header["port"], header["token"])
    bodies[1] = msgspec.msgpack.encode({**header, "host": "", "port": port})
    return unit_of(bodies), announced


class LaneParser:
    """Cuts one direction of one lane into units."""

    def __init__(self, first_bytes: int) -> None:
        """`first_bytes` come before the blocks, and are passed on as they come."""
        self._data = bytearray()
        self._first_left = first_bytes

    def feed(self, data: bytes) -> list[Unit]:
        """The units that `data` completes."""
        units: list[Unit] = []
        if self._first_left:
            first = data[: self._first_left]
            self._first_left -= len(first)
            units.append(Unit(Kind.PREAMBLE, bytes(first)))
            data = data[len(first) :]
        self._data += data
        at = 0
        while len(self._data) - at >= HEADER.size:
            length = HEADER.unpack_from(self._data, at)[2]
            end = at + HEADER.size + length + TRAILER_BYTES
            if len(self._data) < end:
                break
            units.append(_block(bytes(self._data[at:end])))
            at = end
        del self._data[:at]
        return units


def _block(raw: bytes) -> Unit:
    """Its spans are those of a message with one payload frame: the checksum is part of the block,
    and there is no magic."""
    header = HEADER.size
    spans = Span(0, 0, 0), Span(0, 0, header), Span(header, header, len(raw))
    return Unit(Kind.BLOCK, raw, spans)
