"""Limits of what a server accepts in one message, and of what a get names ahead."""

from typing import NamedTuple

from remote_server import protocol
from remote_server.values import MiB

LANE_WINDOW_BYTES = 64 * MiB
"""Of a server whose Welcome has no such limit."""


class Limits(NamedTuple):
    """Limits of a Welcome; before the first one, those of the protocol."""

    max_keys: int = protocol.MAX_KEYS_PER_MESSAGE
    max_frame_bytes: int = protocol.MAX_FRAME_BYTES
    max_message_bytes: int = protocol.MAX_MESSAGE_BYTES
    ahead_bytes: int = 0  # named ahead of a get's requests, for a server that gains by it
    packed_keys: bool = False  # keys of one length may be one binary
    lane_window_bytes: int = LANE_WINDOW_BYTES  # under way on lanes, of gets and of puts each

    @staticmethod
    def of(welcome: protocol.Welcome) -> "Limits":
        return Limits(
            min(max(1, welcome.max_keys), protocol.MAX_KEYS_PER_MESSAGE),
            min(max(1, welcome.max_frame_bytes), protocol.MAX_FRAME_BYTES),
            min(max(1, welcome.max_message_bytes), protocol.MAX_MESSAGE_BYTES),
            welcome.ahead_bytes,
            welcome.packed_keys,
            welcome.lane_window_bytes or LANE_WINDOW_BYTES,
        )
