"""Gets on one plain socket, one batch outstanding: a reply in one message, or block by block.

kvferry's client always streams, so this module implements the protocol itself. Both ways share all
code but the flag, so that their difference is the server's kind of reply.
"""

import time
from typing import Any

import zmq

from benchmarks.harness.runner import Skipped, WrongBytes
from benchmarks.remote_kv_cache.work.blocks import Batch, Pool, Work
from benchmarks.remote_kv_cache.work.ferry_client import key_of
from remote_server import protocol
from remote_server.values import server_address

_PATIENCE_MS = 60_000


class SocketGets:
    """One DEALER socket that requests a batch at a time. `stream` chooses the way."""

    def __init__(
        self,
        endpoint: str,
        namespace: str,
        work: Work,
        target: Pool,
        *,
        integrity: bool,
        stream: bool = False,
    ) -> None:
        """Raises `Skipped` for a fleet and for a server that requires keys."""
        if "," in endpoint:
            raise Skipped("this plain socket has one server")
        address = server_address(endpoint)
        if address.keys:
            raise Skipped("this plain socket has no keys")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._channel = self._context.socket(zmq.DEALER)
        self._channel.linger = 0
        # A high-water mark with a reset and the server's heartbeat would end the process.
        self._channel.rcvhwm = 0
        self._channel.rcvtimeo = _PATIENCE_MS
        self._channel.connect(address.endpoint)
        self._namespace = namespace
        self._target = target
        self._integrity = integrity
        self._stream = stream
        self._requests = 0
        at_once = max(1, protocol.MAX_MESSAGE_BYTES // work.block_bytes)
        self._parts = [
            Batch(batch.source[first : first + at_once], batch.target[first : first + at_once])
            for batch in work.batches
            for first in range(0, len(batch.source), at_once)
        ]

    def get(self) -> None:
        """Get all blocks, batch after batch, into the target's rows."""
        self.get_and_time()

    def get_and_time(self) -> list[float]:
        """As `get`; returns the seconds from each request to its first block in its row."""
        return [self._get(part) for part in self._parts]

    def close(self) -> None:
        self._channel.close()
        self._context.term()

    def _get(self, part: Batch) -> float:
        self._requests += 1
        keys = [key_of(number) for number in part.source]
        request = protocol.Get(
            request_id=self._requests, namespace=self._namespace, keys=keys, stream=self._stream
        )
        started = time.perf_counter()
        self._channel.send_multipart(protocol.encode(request))
        got, payload = self._reply()
        if not isinstance(got, protocol.Got) or got.hit != len(keys):
            raise AssertionError(f"not all blocks came: {got}")
        if not self._stream:
            return self._take(part, keys, got.found, got, payload) - started
        first, more = None, True
        while more:
            some, payload = self._reply()
            if not isinstance(some, protocol.Blocks):
                raise AssertionError(f"no block: {some}")
            at = self._take(part, keys, some.indices, some, payload)
            first, more = first or at, some.more
        assert first is not None
        return first - started

    def _reply(self) -> tuple[Any, list[zmq.Frame]]:
        _, header, *payload = self._channel.recv_multipart(copy=False)
        return protocol.decode_reply(header.buffer), payload

    def _take(
        self,
        part: Batch,
        keys: list[bytes],
        indices: list[int],
        header: protocol.Got | protocol.Blocks,
        payload: list[zmq.Frame],
    ) -> float:
        """Copy the blocks of a message into their rows. Returns when the first was copied."""
        frames = [frame.buffer for frame in payload]
        first = None
        for index, block, announced in zip(
            indices,
            protocol.split_frames(frames, header.lengths, header.blocks_per_frame),
            header.checksums,
            strict=True,
        ):
            row = memoryview(self._target[part.target[index]])
            row[:] = block
            if self._integrity:
                landed = protocol.checksum(self._namespace, keys[index], row)
                if landed != announced:
                    raise WrongBytes(f"block {index} has another checksum than announced")
            first = first or time.perf_counter()
        assert first is not None
        return first
