"""Puts whose blocks are payload frames."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from remote_server import protocol
from remote_server.errors import RemoteProtocolError, RequestRefused
from remote_server.protocol import (
    ErrorCode,
)
from remote_server.server.transfer.copier import TURN_BYTES, Copier, Uncopied, waiting_bytes
from remote_server.server.transfer.copies import copy_in
from remote_server.server.transfer.put import Filled, Put, Source, check_put
from remote_server.store.puts import Reserved
from remote_server.store.store import Store


class FramePuts(NamedTuple):
    """What the puts of a tenant share whose blocks travel as payload frames."""

    store: Store
    copier: Copier
    uncopied: Uncopied
    tenant: str


class Frames(Source):
    """The payload frames of one put, in use until they are copied."""

    turn_bytes = TURN_BYTES
    is_stable = True

    def __init__(
        self, puts: FramePuts, client: bytes, request: protocol.Put, payload: Sequence[memoryview]
    ) -> None:
        self.checksums = request.checksums or [None] * len(request.keys)
        self._puts = puts
        self._client = client
        self._request = request
        self._payload = payload
        self._blocks: Iterator[memoryview] = iter(())
        """Those of the keys that are not reserved yet."""
        self._views: list[list[memoryview]] = []
        """Of the blocks to be written, by part."""
        self._waiting: list[int] = []
        """The bytes of each part that count as not copied."""

    def check(self) -> None:
        request, store = self._request, self._puts.store
        check_put(request, len(self.checksums), store.namespaces.known.get(request.namespace))
        try:
            self._blocks = protocol.split_frames(
                self._payload, request.lengths, request.blocks_per_frame
            )
        except RemoteProtocolError as error:
            store.counters["integrity_length"] += 1
            raise RequestRefused(ErrorCode.BAD_REQUEST, str(error)) from error
        self._payload = ()
        num_bytes = sum(request.lengths)
        self._puts.uncopied.check(self._client, waiting_bytes(len(request.keys), num_bytes))
        store.counters["bytes_in"] += num_bytes

    def reserved(self, part: Reserved, lengths: Sequence[int]) -> None:
        of_part = [*islice(self._blocks, len(lengths))]
        self._views.append([of_part[index] for index in part.indices])
        self._waiting.append(waiting_bytes(len(lengths), sum(lengths)))

    def replies_first(self) -> bool:
        # The frames are libzmq's memory, so the sender's own is free since they were sent. While
        # more bytes wait than one turn copies, the answer waits too: it frees the sender's window,
        # and nothing else slows the sender down.
        return self._request.deferred and not self._puts.copier.is_full()

    def queue(self, put: Put) -> None:
        self._puts.uncopied.take(self._client, sum(self._waiting))
        self._puts.copier.submit(put, self._client, self._puts.tenant)

    def fill(self, number: int, part: Reserved, places: slice, filled: Filled) -> None:
        views = self._views[number][places]
        filled(copy_in(part.blocks[places], views, self._puts.store.memory))

    def part_ended(self, number: int) -> None:
        self._puts.uncopied.give_back(self._client, self._waiting[number])
        self._views[number] = []  # libzmq's memory
