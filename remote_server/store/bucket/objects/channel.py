"""Messages and memory between the server and the process that calls the object store.

A channel is a pair of sockets and a memory file. One call at a time has it: the server writes a
`Call`, the process answers with an `Ended`. The bytes of an object are in the memory, which both
have mapped: those of a put from the call on, those of a read when it has ended.
"""

import mmap
import os
import socket
from contextlib import suppress
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

Operation = Literal[
    "put", "read", "head", "size", "remove", "list", "next", "folders", "unfinished"
]

MAX_MESSAGE_BYTES = 16 << 20
"""No message is longer: 1,000 objects of a list have 1.2 MB with the longest names of S3."""


class Call(msgspec.Struct, frozen=True, array_like=True):
    """One call of the store, with the arguments of `Objects`."""

    operation: Operation
    names: list[str] = []
    begin: int = 0
    end: int = 0
    """The bytes of the object; of a put those of the memory."""
    create: bool = True
    before: float = 0.0


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """The end of a call: its result, or a failure and the words of the store."""

    result: Any = None
    failure: str = ""
    words: str = ""


Message = TypeVar("Message", Call, Ended)


def copy(into: memoryview, data: memoryview) -> None:
    """Without the interpreter, as numpy does it. Both have the same length."""
    if data.nbytes:
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8))


class ChannelEnded(Exception):
    """The other side has closed the channel, has died, or does not answer."""


class Channel:
    """One end. One thread at a time."""

    def __init__(self, near: socket.socket, memory: int) -> None:
        """Both are the channel's from now on; `memory` is the descriptor of a memory file."""
        self._socket = near
        self._file = memory
        self._memory: mmap.mmap | None = None
        self.num_resident = 0
        """Bytes of the memory that are not given back."""

    def send(self, message: Call | Ended) -> None:
        """Raises `ChannelEnded`, also after the time of `wait_at_most`."""
        data = msgspec.msgpack.encode(message)
        try:
            self._socket.sendall(len(data).to_bytes(4, "little") + data)
        except OSError as error:
            raise ChannelEnded(str(error)) from error

    def receive(self, kind: type[Message]) -> Message:
        """Raises `ChannelEnded`, also after the time of `wait_at_most`."""
        length = int.from_bytes(self._receive(4), "little")
        if length > MAX_MESSAGE_BYTES:
            raise ChannelEnded(f"a message of {length:,} bytes")
        try:
            return msgspec.msgpack.decode(self._receive(length), type=kind)
        except msgspec.MsgspecError as error:
            raise ChannelEnded(str(error)) from error

    def wait_at_most(self, seconds: float) -> None:
        """For each part of a message, from now on."""
        self._socket.settimeout(seconds)

    def memory(self, num_bytes: int) -> memoryview:
        """The first `num_bytes` of the memory, which grows to it. Views of the time before stay
        valid."""
        if not num_bytes:
            return memoryview(b"")
        if self._memory is None or len(self._memory) < num_bytes:
            if os.fstat(self._file).st_size < num_bytes:
                os.ftruncate(self._file, num_bytes)
            self._memory = mmap.mmap(self._file, num_bytes)
        self.num_resident = max(self.num_resident, num_bytes)
        return memoryview(self._memory)[:num_bytes]

    def empty_memory(self) -> None:
        """Give the memory back to the machine. Its bytes are zeros then."""
        if self._memory is not None:
            self._memory.madvise(mmap.MADV_REMOVE)
        self.num_resident = 0

    def cut(self) -> None:
        """From any thread: end the call that waits, and all later ones, by `ChannelEnded`."""
        with suppress(OSError):  # the other side is gone already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Views of the memory stay valid."""
        self._socket.close()
        os.close(self._file)
        self._memory = None

    def _receive(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        view = memoryview(data)
        while view:
            try:
                num = self._socket.recv_into(view)
            except OSError as error:
                raise ChannelEnded(str(error)) from error
            if not num:
                raise ChannelEnded("the other side has closed it")
            view = view[num:]
        return data
