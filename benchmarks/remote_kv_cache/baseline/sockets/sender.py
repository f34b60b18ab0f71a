"""A process that holds blocks and sends them: the far end of every socket measured here.

It answers on all transports at once, a thread each, and only sends: no index, no checksum, no copy
of its own. So the cost of receiving from it is the cost of the transport.

A request is one byte for the kind of reply, then the ids of the blocks, 64 bits each.
"""

import argparse
import contextlib
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import zmq

from benchmarks.remote_kv_cache.work import blocks
from benchmarks.remote_kv_cache.work.blocks import Pool
from examples.processes import LoggedProcess
from remote_server.allocator import keep_freed_memory

MODULE = "benchmarks.remote_kv_cache.baseline.sockets.sender"

COPIED = b"c"  # one message, a frame per block, each copied into it, as in the source
REFERRED = b"r"  # one message, a frame per block, sent from the pool itself
STREAMED = b"s"  # a message per block, sent from the pool itself

_STREAM_MARK = 8
"""Queued messages, at most. More of them leave the CPU cache before they are read."""


def answer(channel: zmq.Socket[bytes], pool: Pool, request: bytes) -> None:
    """Send the blocks of `request`. Waits for a slow reader: a DEALER drops nothing."""
    ids = np.frombuffer(request, np.int64, offset=1)
    rows = [memoryview(pool[number]) for number in ids]
    if request[:1] == STREAMED:
        for row in rows:
            channel.send(row, copy=False)
    else:
        channel.send_multipart(rows, copy=request[:1] == COPIED)


def serve_zmq(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, pool: Pool) -> str:
    """Answer on a thread of its own until the context ends. Returns the address with the port."""
    channel = context.socket(zmq.DEALER)
    channel.sndhwm = _STREAM_MARK
    channel.linger = 0
    channel.bind(endpoint)
    bound = channel.getsockopt_string(zmq.LAST_ENDPOINT)

    def serve() -> None:
        with contextlib.suppress(zmq.ContextTerminated), channel:
            while True:
                answer(channel, pool, channel.recv())

    threading.Thread(target=serve, name=f"send-{endpoint[:3]}", daemon=True).start()
    return bound


def serve_raw(listener: socket.socket, pool: Pool) -> None:
    """Accept connections without end, each answered on a thread of its own."""

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError), connection.makefile("rb") as requests:
            while header := requests.read(4):
                wanted = requests.read(8 * int.from_bytes(header, "little"))
                for number in np.frombuffer(wanted, np.int64):
                    connection.sendall(pool[number])

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, name="accept", daemon=True).start()


def main(argv: Sequence[str] | None = None) -> None:
    """Fill a pool, listen on all transports, print `ready` and serve until a signal."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--block-bytes", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="folder of the unix sockets")
    parser.add_argument("--tuned", action="store_true", help="keep freed memory, as kvferry does")
    arguments = parser.parse_args(argv)
    if arguments.tuned:
        keep_freed_memory()
    pool = blocks.allocate(arguments.blocks, arguments.block_bytes)
    blocks.fill(pool)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    tcp = serve_zmq(context, "tcp://127.0.0.1:*", pool)
    serve_zmq(context, f"ipc://{arguments.folder}/zmq", pool)
    raw_tcp = socket.create_server(("127.0.0.1", 0))
    serve_raw(raw_tcp, pool)
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(str(arguments.folder / "raw"))
    unix.listen()
    serve_raw(unix, pool)
    print(f"ready {tcp} {raw_tcp.getsockname()[1]}", flush=True)
    threading.Event().wait()


class Sender(LoggedProcess):
    """The process, for a `with` block. Its unix sockets are in `folder`."""

    name = "block-sender"

    def __init__(self, num_blocks: int, block_bytes: int, folder: Path, tuned: bool) -> None:
        super().__init__(
            [sys.executable, "-m", MODULE, "--blocks", str(num_blocks),
             "--block-bytes", str(block_bytes), "--folder", str(folder),
             *(["--tuned"] if tuned else [])]
        )  # fmt: skip
        self.zmq_ipc = f"ipc://{folder}/zmq"
        self.unix = str(folder / "raw")
        self.zmq_tcp = ""
        self.tcp_port = 0

    def is_ready(self) -> bool:
        for line in self.log.read_text(errors="replace").splitlines():
            if line.startswith("ready "):
                _, self.zmq_tcp, port = line.split()
                self.tcp_port = int(port)
                return True
        return False


if __name__ == "__main__":
    main()
