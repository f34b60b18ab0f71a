"""Limits of what a server accepts in one message, and of what a get names ahead."""

from typing import NamedTuple

from remote_server import protocol


class Limits(NamedTuple):
    """Limits of a Welcome; before the first one, those of the protocol."""

    max_keys: int = protocol.MAX_KEYS_PER_MESSAGE
    max_frame_bytes: int = protocol.MAX_FRAME_BYTES
    max_message_bytes: int = protocol.MAX_MESSAGE_BYTES
    ahead_bytes: int = 0  # named ahead of a get's requests, for a server that gains by it
    packed_keys: bool = False  # keys of one length may be one binary

    @staticmethod
    def of(welcome: protocol.Welcome) -> "Limits":
        return Limits(
            min(max(1, welcome.max_keys), protocol.MAX_KEYS_PER_MESSAGE),
            min(max(1, welcome.max_frame_bytes), protocol.MAX_FRAME_BYTES),
            min(max(1, welcome.max_message_bytes), protocol.MAX_MESSAGE_BYTES),
            welcome.ahead_bytes,
            welcome.packed_keys,
        )
