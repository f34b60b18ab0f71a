"""Lines of a recorded trace: from the requests that a server remembered, hashed anew and merged.

docs/recording.md has the format. An id is a keyed hash of the block's key and its namespace. The
hash's key is random, and is held by the one `Lines` of a recording alone.
"""

import hashlib
import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import msgspec

from remote_server.errors import RemoteProtocolError, RequestRefused
from remote_server.protocol import KeyState, RecordedRequest, Stretch, check_chain, cut_keys
from remote_server.store.chains import joined
from remote_server.store.eviction.learner import AGAIN_S, REQUEST_S

VERSION = 1

ID_BITS = 53
"""Of an id: as many as readers that know floating numbers only read exactly."""

MOST_NAMED = 1 << 18
"""Keys that lookups named: so many are kept, and up to as many more. 50 MB."""

MOST_WAITING = 1 << 16
"""Lines that a clock which stands still holds back."""

MOST_SECONDS = 1e12
"""Of a server's clock."""


@dataclass(slots=True, eq=False)
class Line:
    """One line to be: a part of a request, whose blocks are of one group."""

    at_s: float
    kind: str
    namespace: int
    block_bytes: int
    stretch: Stretch
    ids: Sequence[int]
    found: int = 0
    is_served: bool = False
    """A get or a put of its blocks came."""

    @property
    def start(self) -> int:
        """The first token of its blocks, in their prompt."""
        stretch = self.stretch
        return stretch.start - stretch.backwards * (stretch.rows - 1) * stretch.tokens

    def is_again(self, ids: Sequence[int], at_s: float) -> bool:
        """Whether a lookup of `ids` is of the same request; as the server's eviction has it."""
        if self.ids[-1] != ids[-1] or at_s - self.at_s >= AGAIN_S:
            return False
        return not self.is_served or len(ids) < len(self.ids)


class Lines:
    """Makes the lines. `take` the requests in their order, and write the lines that are `due`."""

    def __init__(self) -> None:
        self._salt = secrets.token_bytes(hashlib.blake2b.MAX_KEY_SIZE)
        self._namespaces: dict[str, int] = {}
        self._new: dict[int, Line] = {}
        self._old: dict[int, Line] = {}
        self._waiting: deque[Line] = deque()
        self._began_s: float | None = None
        self.num_lines = 0
        self.num_lookups = 0
        self.num_without_place = 0
        """Lookups and puts without chain fields, or of a namespace that no client has declared.
        They are left out."""
        self.found_tokens = self.tokens = 0
        """Of lookups."""

    def take(self, requests: Iterable[RecordedRequest]) -> None:
        """The next requests of the server. Raises `RemoteProtocolError`."""
        for request in requests:
            keys, known = cut_keys(request.keys, request.key_bytes), self._namespaces
            _check(request, len(keys))
            if request.kind == "get":
                if (number := known.get(request.namespace)) is not None:
                    self._got(self._ids(number, keys), request.at_s)
            elif not request.chain or not request.block_bytes:
                self.num_without_place += 1
            else:
                number = known.setdefault(request.namespace, len(known))
                self._placed(request, number, self._ids(number, keys))

    def due(self, now_s: float) -> Iterator[bytes]:
        """The lines that nothing changes any more, when all requests until `now_s` are taken. A
        line counts when the next one is asked for."""
        while self._waiting and (
            now_s - self._waiting[0].at_s >= AGAIN_S or len(self._waiting) > MOST_WAITING
        ):
            yield self._text(line := self._waiting.popleft())
            self._count(line)

    def rest(self) -> Iterator[bytes]:
        """All other lines, as `due`."""
        while self._waiting:
            yield self._text(line := self._waiting.popleft())
            self._count(line)

    # ── requests ─────────────────────────────────────────────────────────────────────────

    def _placed(self, request: RecordedRequest, number: int, ids: list[int]) -> None:
        begin = 0
        for stretch in joined(request.chain):
            here = slice(begin, begin + stretch.rows)
            begin += stretch.rows
            of_stretch, states = ids[here], request.states[here]
            if stretch.backwards:
                of_stretch, states = of_stretch[::-1], states[::-1]
            line = Line(
                request.at_s, request.kind, number, request.block_bytes, stretch, of_stretch,
                _found(states, stretch),
            )  # fmt: skip
            if request.kind == "lookup":
                self._looked_up(line)
            else:
                self._put(line)

    def _looked_up(self, line: Line) -> None:
        before = self._named(line.ids[-1])
        if before is not None and before.is_again(line.ids, line.at_s):
            if len(before.ids) == len(line.ids):
                before.found = line.found
            return
        self._new.update(dict.fromkeys(line.ids, line))
        if len(self._new) > MOST_NAMED:
            self._new, self._old = {}, self._new
        self._waiting.append(line)

    def _put(self, line: Line) -> None:
        """Blocks that a lookup named are stored by a replay of that lookup."""
        known = self._got(line.ids, line.at_s)
        first = 0
        for is_known, some in groupby(known):
            rows = len([*some])
            if not is_known:
                start = line.start + first * line.stretch.tokens
                stretch = msgspec.structs.replace(
                    line.stretch, rows=rows, start=start, backwards=False
                )
                ids = line.ids[first : first + rows]
                put = Line(line.at_s, "put", line.namespace, line.block_bytes, stretch, ids)
                self._waiting.append(put)
            first += rows

    def _got(self, ids: Sequence[int], at_s: float) -> list[bool]:
        """Whether a lookup named each shortly before; that one is served now."""
        known = []
        for one in ids:
            line = self._named(one)
            is_known = line is not None and at_s - line.at_s < REQUEST_S
            known.append(is_known)
            if line is not None and is_known:
                line.is_served = True
        return known

    def _named(self, one: int) -> Line | None:
        """The last lookup that named this id."""
        return self._new.get(one) or self._old.get(one)

    def _ids(self, namespace: int, keys: Iterable[bytes]) -> list[int]:
        hashed = hashlib.blake2b(key=self._salt, digest_size=8)
        hashed.update(b"%d " % namespace)
        ids = []
        for key in keys:
            one = hashed.copy()
            one.update(key)
            ids.append(int.from_bytes(one.digest()) >> 64 - ID_BITS)
        return ids

    # ── text ─────────────────────────────────────────────────────────────────────────────

    def _count(self, line: Line) -> None:
        self.num_lines += 1
        if line.kind == "lookup":
            self.num_lookups += 1
            self.tokens += len(line.ids) * line.stretch.tokens
            self.found_tokens += line.found * line.stretch.tokens

    def _text(self, line: Line) -> bytes:
        if self._began_s is None:
            self._began_s = line.at_s
        size = line.stretch.tokens
        end = line.start + len(line.ids) * size
        fields: dict[str, Any] = {
            "timestamp": max(0, round((line.at_s - self._began_s) * 1000)),
            "type": line.kind, "namespace": line.namespace, "block_size": size,
            "block_bytes": line.block_bytes, "input_length": end, "output_length": 0,
            "hash_ids": line.ids, "found": line.found, "group": line.stretch.group,
        }  # fmt: skip
        return as_line(fields)


def head(software: str, tiers: dict[str, int]) -> bytes:
    """The first line. `tiers` are the bytes that each tier of the server may hold."""
    return as_line({"kvferry_trace": VERSION, "software": software, "tiers": tiers})


def foot(lines: Lines, lost: int) -> bytes:
    """The last line."""
    return as_line({"end": True, "requests": lines.num_lines, "lost": lost})


def as_line(fields: dict[str, Any]) -> bytes:
    return msgspec.json.encode(fields) + b"\n"


def _check(request: RecordedRequest, num_keys: int) -> None:
    """Raise `RemoteProtocolError` for a request that no server remembers."""
    if not num_keys or not 0.0 <= request.at_s <= MOST_SECONDS:
        raise RemoteProtocolError(f"a request of {num_keys} keys at {request.at_s:g} s")
    if request.kind not in ("lookup", "put", "get"):
        raise RemoteProtocolError(f"a request of the kind {request.kind!r:.40}")
    if request.kind == "lookup" and len(request.states) != num_keys:
        raise RemoteProtocolError(f"{len(request.states)} states of {num_keys} keys")
    try:
        check_chain(request.chain, num_keys)
    except RequestRefused as error:
        raise RemoteProtocolError(f"{error}") from None


def _found(states: bytes, stretch: Stretch) -> int:
    """How many blocks a request of these states can use: those before the first that is missing. Of
    a group with a window the blocks before it are not needed, and all that are there count."""
    if stretch.window:
        return states.count(KeyState.READABLE)
    return len(states) - len(states.lstrip(bytes([KeyState.READABLE])))
