"""A get that is answered in one message, as the source's was: everything sent, then copied.

kvferry's client always streams, so this speaks the protocol itself, on one socket.
"""

import zmq

from benchmarks.harness.runner import WrongBytes
from benchmarks.remote_kv_cache.baseline.blocks import Batch, Pool, Work
from benchmarks.remote_kv_cache.baseline.ferry_client import key_of
from remote_server import protocol

_PATIENCE_MS = 60_000


class WholeGets:
    """One DEALER socket that asks for a batch at a time."""

    def __init__(
        self, endpoint: str, namespace: str, work: Work, target: Pool, *, integrity: bool
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._channel = self._context.socket(zmq.DEALER)
        self._channel.linger = 0
        self._channel.rcvhwm = 0  # a mark, a reset and the server's heartbeat would end the process
        self._channel.rcvtimeo = _PATIENCE_MS
        self._channel.connect(endpoint)
        self._namespace = namespace
        self._target = target
        self._integrity = integrity
        self._requests = 0
        at_once = max(1, protocol.MAX_MESSAGE_BYTES // work.block_bytes)
        self._parts = [
            Batch(batch.source[first : first + at_once], batch.target[first : first + at_once])
            for batch in work.batches
            for first in range(0, len(batch.source), at_once)
        ]

    def get(self) -> None:
        """Everything, batch after batch, into the target's rows."""
        for part in self._parts:
            self._get(part)

    def close(self) -> None:
        self._channel.close()
        self._context.term()

    def _get(self, part: Batch) -> None:
        self._requests += 1
        keys = [key_of(number) for number in part.source]
        request = protocol.Get(
            request_id=self._requests, namespace=self._namespace, keys=keys, stream=False
        )
        self._channel.send_multipart(protocol.encode(request))
        _, header, *payload = self._channel.recv_multipart(copy=False)
        got = protocol.decode_reply(header.buffer)
        if not isinstance(got, protocol.Got) or got.hit != len(keys):
            raise AssertionError(f"not all blocks came: {got}")
        frames = [frame.buffer for frame in payload]
        for index, block, announced in zip(
            got.found,
            protocol.split_frames(frames, got.lengths, got.blocks_per_frame),
            got.checksums,
            strict=True,
        ):
            row = memoryview(self._target[part.target[index]])
            row[:] = block
            if self._integrity:
                landed = protocol.checksum(self._namespace, keys[index], row)
                if landed != announced:
                    raise WrongBytes(f"block {index} has another checksum than announced")
