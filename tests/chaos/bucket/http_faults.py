"""An HTTP proxy before an object store, whose faults a test switches at any time.

It forwards each request over a connection of its own, piece by piece, so that a client that is
killed in the middle of its body cuts it for the store as well. Answers are read whole before they
are sent on.
"""

import asyncio
import random
import re
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import NamedTuple

_PIECE_BYTES = 16 << 10


class Damage(StrEnum):
    """What is done to the body of the answer to a GET of an object."""

    CUT = auto()  # the connection ends after half of it
    SHORT = auto()  # half of it, with headers that agree
    FLIPPED = auto()  # one bit, in the first 200 bytes of a read from the beginning
    SWAPPED = auto()  # the answer for another object


@dataclass(frozen=True)
class StoreFaults:
    """What happens to every request, until the next `set`. By default, nothing."""

    refuse: bool = False
    """Nothing listens; connections that exist are reset when this is set."""

    hold: bool = False
    """Requests are read and have no answer."""

    status: int = 0
    """Requests that match `only` are answered with this, and with `code`."""

    code: str = ""
    only: str = ""
    """A pattern of `METHOD target`."""

    damage: Damage | None = None
    catch_put: float = 0.0
    """A PUT stands still after this share of its body."""


CLEAR = StoreFaults()


class Message(NamedTuple):
    """The head of a request or an answer, and the body of an answer."""

    start: str
    headers: dict[str, str]
    body: bytes = b""

    def raw(self) -> bytes:
        lines = [self.start, *(f"{name}: {value}" for name, value in self.headers.items())]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + self.body

    @property
    def status(self) -> int:
        return int(self.start.split()[1])


class _Cut(Exception):
    """This connection has ended, by a fault."""


class HttpProxy:
    """The proxy, on one event loop. `target` is the host and port of the store."""

    def __init__(self, target: str, seed: int) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._rng = random.Random(seed)
        self._faults = CLEAR
        self._changed = asyncio.Event()
        self._counts: Counter[str] = Counter()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._own_port = 0
        self._last: dict[str, tuple[str, Message]] = {}
        """By the range of the read, the object and the answer that came last."""

    async def listen(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._own_port)
        self._own_port = self._server.sockets[0].getsockname()[1]
        return f"127.0.0.1:{self._own_port}"

    async def set(self, faults: StoreFaults) -> None:
        self._faults = faults
        self._changed.set()
        self._changed = asyncio.Event()
        if faults.refuse and self._server is not None:
            self._server.close()
            self._server = None
            for writer in self._writers:
                writer.transport.abort()
        elif not faults.refuse and self._server is None:
            await self.listen()

    async def counts(self) -> dict[str, int]:
        return dict(self._counts)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while (request := await _read_head(reader)) is not None:
                await self._one(request, reader, writer)
        except (OSError, asyncio.IncompleteReadError, _Cut):
            pass
        finally:
            self._writers.remove(writer)
            writer.transport.abort()

    async def _one(
        self, request: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        method, target, _ = request.start.split()
        faults = self._faults
        matches = re.search(faults.only, f"{method} {target}") is not None
        if faults.status and matches:
            await _read_body(reader, request)
            answer = self._refusal(faults)
        elif faults.hold:
            self._counts["held"] += 1
            await self._changed.wait()
            raise _Cut
        else:
            answer = await self._forward(request, reader, method, faults)
        if method == "GET" and "?" not in target and answer.status in (200, 206):
            wanted = request.headers.get("range", "")
            if faults.damage is not None:
                answer = self._damaged(answer, faults.damage, target, wanted)
            else:
                self._last[wanted] = target, answer
        writer.write(answer.raw())
        await writer.drain()
        if len(answer.body) < int(answer.headers.get("content-length", 0)) and method != "HEAD":
            raise _Cut

    def _refusal(self, faults: StoreFaults) -> Message:
        self._counts[str(faults.status)] += 1
        body = f"<Error><Code>{faults.code}</Code><Message>of the test</Message></Error>".encode()
        headers = {"content-type": "application/xml", "content-length": str(len(body))}
        return Message(f"HTTP/1.1 {faults.status} {faults.code}", headers, body)

    async def _forward(
        self, request: Message, reader: asyncio.StreamReader, method: str, faults: StoreFaults
    ) -> Message:
        their_reader, their_writer = await asyncio.open_connection(self._host, self._port)
        try:
            headers = {**request.headers, "connection": "close"}
            their_writer.write(Message(request.start, headers).raw())
            length = int(request.headers.get("content-length", 0))
            stop = int(length * faults.catch_put) if method == "PUT" else 0
            sent = 0
            while sent < length:
                piece = await reader.readexactly(min(_PIECE_BYTES, length - sent))
                their_writer.write(piece)
                await their_writer.drain()
                sent += len(piece)
                if stop and sent >= stop:
                    stop = 0
                    self._counts["caught"] += 1
                    await self._changed.wait()
            answer = await _read_head(their_reader)
            if answer is None:
                raise _Cut
            body = b""
            if method != "HEAD" and answer.status not in (204, 304):
                body = await _read_body(their_reader, answer)
            kept = {
                name: value for name, value in answer.headers.items()
                if name not in ("connection", "transfer-encoding")
            }  # fmt: skip
            if method != "HEAD":
                kept["content-length"] = str(len(body))
            return Message(answer.start, kept, body)
        finally:
            their_writer.transport.abort()

    # ── damage ───────────────────────────────────────────────────────────────────────────

    def _damaged(self, answer: Message, damage: Damage, target: str, wanted: str) -> Message:
        if damage is Damage.SWAPPED:
            other = self._last.get(wanted)
            if other is None or other[0] == target:
                return answer
            answer = other[1]
        elif damage is Damage.FLIPPED:
            body = bytearray(answer.body)
            within = 200 if wanted.startswith("bytes=0-") else len(body)
            body[self._rng.randrange(min(within, len(body)))] ^= 1 << self._rng.randrange(8)
            answer = answer._replace(body=bytes(body))
        else:
            answer = answer._replace(body=answer.body[: len(answer.body) // 2])
            if damage is Damage.SHORT:
                answer = _agreeing(answer)
        self._counts[damage] += 1
        return answer


def _agreeing(answer: Message) -> Message:
    """`answer` with headers that fit its body, as of an object that is so short."""
    headers = {**answer.headers, "content-length": str(len(answer.body))}
    found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", headers.get("content-range", ""))
    if found is not None:
        end = int(found[1]) + len(answer.body)
        headers["content-range"] = f"bytes {found[1]}-{end - 1}/{end}"
    return answer._replace(headers=headers)


async def _read_head(reader: asyncio.StreamReader) -> Message | None:
    """The head of the next message, with names in lower case; None at the end."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    start, *lines = raw[:-4].decode("latin-1").split("\r\n")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return Message(start, headers)


async def _read_body(reader: asyncio.StreamReader, head: Message) -> bytes:
    if "chunked" in head.headers.get("transfer-encoding", ""):
        pieces = []
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            pieces.append(await reader.readexactly(size))
            await reader.readexactly(2)
        await reader.readuntil(b"\r\n")
        return b"".join(pieces)
    if "content-length" in head.headers:
        return await reader.readexactly(int(head.headers["content-length"]))
    if head.start.startswith("HTTP/"):
        return await reader.read()  # until its end
    return b""
