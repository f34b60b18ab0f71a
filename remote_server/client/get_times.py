"""Times of one get: this process, the network, the server and its storage."""

from collections.abc import Callable
from dataclasses import dataclass

from remote_server import protocol


@dataclass(frozen=True)
class GetTimes:
    """Parts of the time from `began` to `ended`, in seconds by the client's clock, which add up to
    it.

    They belong to the batch whose last message came last: a get of up to `ClientConfig.batch_bytes`
    is one batch. With several batches `serialize_s` includes the wait for space in the window.
    """

    began: float
    """Time of the call of `RemoteClient.get`."""

    ended: float
    """Time at which the last block had been verified."""

    serialize_s: float
    """Until the request was encoded and passed to ZeroMQ."""

    network_s: float
    """In the network, both ways, and in the queues of both sockets."""

    server_s: float
    """In the server, without its storage, until the last message was passed to ZeroMQ."""

    storage_s: float
    """In the server's store: to find and read the blocks."""

    deserialize_s: float
    """Receiving and verifying blocks, except while the server was busy with this get."""


class GetStopwatch:
    """Timestamps of one get. `RemoteClient.get` makes it; then only the I/O thread uses it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._began = clock()
        self._sent: dict[int, float] = {}
        self._landing_s: dict[int, float] = {}
        self.times: GetTimes | None = None
        """None until a message with the server's times has come."""

    def sending(self, request_id: int) -> None:
        """Record that a batch goes to ZeroMQ. Call it before the send: the server may have the
        batch before this thread runs again."""
        self._sent[request_id] = self.clock()

    def landed(self, reply: protocol.Got | protocol.Blocks, came: float) -> None:
        """Record that `reply`, whose header was read at `came`, has been processed."""
        now, sent = self.clock(), self._sent.get(reply.request_id)
        if sent is None:
            return
        before_s = self._landing_s.get(reply.request_id, 0.0)
        self._landing_s[reply.request_id] = before_s + now - came
        if reply.server_us:
            self.times = self._split(sent, came, now, before_s, reply)

    def _split(
        self, sent: float, came: float, now: float, before_s: float,
        reply: protocol.Got | protocol.Blocks,
    ) -> GetTimes:  # fmt: skip
        """The path of one message is the request's, the server's time, and its own way back. The
        message may have waited here while earlier blocks landed, `before_s` in all."""
        server_s = min(reply.server_us / 1e6, came - sent)
        storage_s = min(reply.storage_us / 1e6, server_s)
        on_the_way_s = came - sent - server_s
        waited_s = min(before_s, on_the_way_s)
        return GetTimes(
            began=self._began, ended=now, serialize_s=sent - self._began,
            network_s=on_the_way_s - waited_s, server_s=server_s - storage_s, storage_s=storage_s,
            deserialize_s=waited_s + now - came,
        )  # fmt: skip
