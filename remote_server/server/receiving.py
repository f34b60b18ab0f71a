"""Messages as the ROUTER hands them over: frame by frame, no more of them than a request has."""

from typing import NamedTuple

import zmq

from remote_server import protocol
from remote_server.errors import RequestRefused
from remote_server.protocol import ErrorCode

# The routing id, the magic, the header, and at most one payload frame for each block.
MAX_FRAMES = 3 + protocol.MAX_KEYS_PER_MESSAGE

# Read into nothing after these: 50 ms on a busy core, in which no other client is served.
DISCARDED_FRAMES = 10_000

_HEAD = 3
"""Frames that are needed to refuse a message by its request id."""


class Flooded(Exception):
    """A message has so many frames that reading its rest would keep everybody waiting. It must
    be read before the next one, so only another socket helps."""


class Message(NamedTuple):
    """The routing id and what follows it. With a `refusal` these are the first frames only."""

    frames: list[zmq.Frame]
    refusal: RequestRefused | None = None


def next_message(router: "zmq.Socket[bytes]") -> Message | None:
    """The next message, or None when there is none. Raises `Flooded`; the socket is of no use then.

    libzmq has received a message as a whole before it hands over the first frame. What is bounded
    here is the time and memory that it takes in Python, a hundred times that of libzmq.
    """
    # Asked rather than tried: an exception costs twenty times as much.
    if not int(router.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
        return None
    frames = [router.recv(zmq.NOBLOCK, copy=False)]
    while frames[-1].more:
        if len(frames) == MAX_FRAMES:
            _discard_rest(router)
            refusal = RequestRefused(
                ErrorCode.BAD_MESSAGE,
                f"a message of more than {MAX_FRAMES - 1:,} frames; see PROTOCOL.md",
            )
            return Message(frames[:_HEAD], refusal)
        frames.append(router.recv(zmq.NOBLOCK, copy=False))
    return Message(frames)


def _discard_rest(router: "zmq.Socket[bytes]") -> None:
    for _ in range(DISCARDED_FRAMES):
        if not router.recv(zmq.NOBLOCK, copy=False).more:
            return
    raise Flooded
