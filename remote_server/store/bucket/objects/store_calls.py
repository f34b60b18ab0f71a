"""The process that calls the object store, so that no answer of a store ends the server.

The store's client takes memory by the lengths that an answer names, also that of an error: it ends
its process by `abort` when there is none (obstore 0.12). `python -m
remote_server.store.bucket.objects.store_calls URL LIFE SOCKET:MEMORY ...` gets descriptors that it
inherits: `LIFE`, at whose end the process ends, and the channels of `channel.py`, each of which has
a thread.
"""

import contextlib
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from remote_server.store.bucket.objects.channel import Call, Channel, ChannelEnded, Ended, copy
from remote_server.store.bucket.objects.client import StoreObjects
from remote_server.store.bucket.objects.objects import BucketError, Failure, Listed

MAX_DATA_BYTES = 2 << 30
"""Private memory, beyond which the client is aborted: the packs under way, and what a store sends
where a client sets no bound."""


class Caller:
    """Makes the calls of one channel."""

    def __init__(self, objects: StoreObjects, channel: Channel) -> None:
        self._objects = objects
        self._channel = channel
        self._listing: Iterator[Sequence[Listed]] = iter(())

    def run(self) -> None:
        """Until the server closes the channel."""
        with contextlib.suppress(ChannelEnded):
            while True:
                call = self._channel.receive(Call)
                self._channel.send(self._ended(call))

    def _ended(self, call: Call) -> Ended:
        try:
            return Ended(self._make(call))
        except BucketError as error:
            return Ended(failure=str(error.failure), words=str(error))
        except BaseException as error:  # a panic of the client is no Exception
            return Ended(failure=str(Failure.OTHER), words=repr(error)[:400])

    def _make(self, call: Call) -> object:
        objects, names = self._objects, call.names
        match call.operation:
            case "put":
                data = self._channel.memory(call.end)
                return objects.put(names[0], data, create=call.create)
            case "read":
                body = objects.read(names[0], call.begin, call.end, all_of_it=False)
                copy(self._channel.memory(body.nbytes), body)
                return body.nbytes
            case "head":
                head = objects.read_head(names[0], call.end)
                copy(self._channel.memory(head.data.nbytes), head.data)
                return head.data.nbytes, head.num_bytes, head.modified
            case "size":
                return objects.size_of(names[0])
            case "remove":
                objects.remove(names)
            case "list":
                self._listing = iter(objects.listing(names[0]))
                return next(self._listing, None)
            case "next":
                return next(self._listing, None)
            case "folders":
                return objects.folders(names[0])
            case "unfinished":
                objects.remove_unfinished(names[0], call.before)
        return None


def main(arguments: Sequence[str]) -> None:
    """Make the calls of all channels until the server has closed or lost `LIFE`."""
    url, life, *channels = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends it
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, MAX_DATA_BYTES))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")  # the kernel ends this one first
    objects = StoreObjects(url, make=False)
    for each in channels:
        near, memory = map(int, each.split(":"))
        caller = Caller(objects, Channel(socket.socket(fileno=near), memory))
        threading.Thread(target=caller.run, daemon=True).start()
    with socket.socket(fileno=int(life)) as end:
        end.recv(1)
    os._exit(0)  # without the threads, which may wait for a store that does not answer


if __name__ == "__main__":
    main(sys.argv[1:])
