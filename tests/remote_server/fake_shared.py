"""A fake server on this host: it leases from an arena, and copies from the region it was given.

As in `fake_server.py`, a test scripts one lie and leaves the rest to honest answers. What comes
to its local socket is answered by `local_rule`, on a thread of its own.
"""

import mmap
import os
import secrets
import socket
import threading
from collections.abc import Callable

from fake_server import PATIENCE_S, Asked, FakeServer
from msgspec.structs import replace
from shared_peer import memfd

from remote_server import protocol
from remote_server.protocol import (
    Attach,
    Attached,
    GetShared,
    Leased,
    NotAttached,
    PutOutcome,
    PutShared,
    Release,
    Stored,
    Welcome,
)  # fmt: skip

ARENA_BYTES = 64 << 20  # of which next to nothing is ever touched
NUM_SLOTS = 64
SLOT_BYTES = 8192
WORDS = NUM_SLOTS * SLOT_BYTES
"""Where the generation words begin."""


class FakeSharedServer(FakeServer):
    def __init__(self, *args: str, **kwargs: str) -> None:
        self.local_socket = f"kvferry-test-{secrets.token_hex(8)}"
        self.arena_fd = memfd(ARENA_BYTES)
        self.arena = mmap.mmap(self.arena_fd, ARENA_BYTES)
        self.words = memoryview(self.arena)[WORDS:].cast("Q")
        self.slots: dict[tuple[str, bytes], int] = {}
        self.token = 77
        self.attaches: list[Attach] = []
        self.connections: list[socket.socket] = []
        self.region: mmap.mmap | None = None
        self.tickets: memoryview | None = None
        self.local_rule: Callable[[socket.socket, Attach, list[int]], None] = self.attach
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self.local_socket}")
        self._listener.listen(8)
        self._local = threading.Thread(target=self._serve_local, name="fake-local", daemon=True)
        self._local.start()
        super().__init__(*args, **kwargs)

    def close(self) -> None:
        self.hang_up()
        if self._listener.fileno() >= 0:
            # Closing alone would not wake the thread that waits for the next one.
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._local.join(PATIENCE_S)
        super().close()
        self._let_go()

    def _let_go(self) -> None:
        """Other tests count descriptors and look at maps."""
        self.words.release()
        self.arena.close()
        if self.arena_fd >= 0:
            os.close(self.arena_fd)
            self.arena_fd = -1
        self.forget_region()

    def forget_region(self) -> None:
        """Unmap what a client offered."""
        if self.region is not None and self.tickets is not None:
            self.region.close()
            tickets = self.tickets.obj
            self.tickets.release()
            tickets.close()
            self.region = self.tickets = None

    # ── the local socket ─────────────────────────────────────────────────────────────────

    def hang_up(self) -> None:
        """End every local connection, as a server does when it dies."""
        while self.connections:
            self.connections.pop().close()

    def _serve_local(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            data, files, _, _ = socket.recv_fds(connection, 4096, 4)
            message = protocol.decode_local(data)
            self.connections.append(connection)
            self.attaches.append(message)
            self.local_rule(connection, message, list(files))
            for fd in files:
                os.close(fd)

    def attach(self, connection: socket.socket, message: Attach, files: list[int]) -> None:
        """What an honest server does."""
        self.forget_region()
        self.region = mmap.mmap(files[0], message.region_bytes, prot=mmap.PROT_READ)
        tickets = mmap.mmap(files[1], protocol.MAX_TICKETS * 8, prot=mmap.PROT_READ)
        self.tickets = memoryview(tickets).cast("Q")
        self.say(connection, self.attached(), [self.arena_fd])

    def attached(self) -> Attached:
        return Attached(epoch=self.epoch, region=self.token, arena_bytes=ARENA_BYTES)

    def say(self, connection: socket.socket, message: object, files: list[int]) -> None:
        socket.send_fds(connection, [protocol.encode_local(message)], files)

    def refuse_attach(self, reason: str) -> None:
        self.local_rule = lambda connection, message, files: self.say(
            connection, NotAttached(reason=reason), []
        )

    # ── requests ─────────────────────────────────────────────────────────────────────────

    def welcome(self, asked: Asked) -> Welcome:
        return replace(super().welcome(asked), local_socket=self.local_socket)

    def answer(self, asked: Asked) -> None:
        match asked.message:
            case PutShared():
                self.send(asked, self.stored_for(asked))
            case GetShared():
                self.send(asked, self.leased_for(asked))
            case Release():
                pass
            case _:
                super().answer(asked)

    def stored_for(self, asked: Asked) -> Stored:
        """Copy the rows, look at the ticket, keep what still counts."""
        put = asked.message
        assert self.region is not None and self.tickets is not None
        spans = zip(put.offsets, put.lengths, strict=True)
        blocks = [self.region[offset : offset + length] for offset, length in spans]
        withdrawn = self.tickets[put.ticket] != put.ticket_value
        outcomes = []
        for number, (key, block) in enumerate(zip(put.keys, blocks, strict=True)):
            if withdrawn:
                outcomes.append(PutOutcome.DECLINED)
                continue
            if put.checksums:
                assert protocol.checksum(put.namespace, key, block) == put.checksums[number]
            existed = (put.namespace, key) in self.blocks
            outcomes.append(PutOutcome.EXISTED if existed else PutOutcome.CREATED)
            self.hold(put.namespace, {key: block})
        return Stored(
            request_id=put.request_id, epoch=self.epoch, total=len(outcomes),
            created=outcomes.count(PutOutcome.CREATED), existed=outcomes.count(PutOutcome.EXISTED),
            forced=0, duplicate=0, declined={"withdrawn": len(outcomes)} if withdrawn else {},
            outcomes=bytes(outcomes),
        )  # fmt: skip

    def leased_for(self, asked: Asked) -> Leased:
        """The honest answer: every block it holds, each in a slot of its own."""
        get = asked.message
        found = [i for i, key in enumerate(get.keys) if (get.namespace, key) in self.blocks]
        blocks = [self.blocks[get.namespace, get.keys[i]] for i in found]
        slots = [self._slot(get.namespace, get.keys[i]) for i in found]
        for slot, block in zip(slots, blocks, strict=True):
            self.fill(slot, block, 1000 + slot)
        checksums = [
            protocol.checksum(get.namespace, get.keys[i], block)
            for i, block in zip(found, blocks, strict=True)
        ]
        return Leased(
            request_id=get.request_id, epoch=self.epoch, lease=get.request_id + 10**6,
            lease_ms=10_000, total=len(get.keys), hit=len(found), miss=len(get.keys) - len(found),
            duplicate=0, found=found, offsets=[slot * SLOT_BYTES for slot in slots],
            lengths=[len(block) for block in blocks],
            checksums=checksums if get.checked else [],
            words=[WORDS + 8 * slot for slot in slots],
            generations=[1000 + slot for slot in slots],
        )  # fmt: skip

    def _slot(self, namespace: str, key: bytes) -> int:
        # Every other slot, so that nobody relies on blocks being neighbours.
        return self.slots.setdefault((namespace, key), 2 * len(self.slots) % NUM_SLOTS)

    def fill(self, slot: int, block: bytes, generation: int) -> None:
        """Put other bytes into a slot, as when its block was evicted."""
        self.words[slot] = 0
        self.arena[slot * SLOT_BYTES : slot * SLOT_BYTES + len(block)] = bytes(block)
        self.words[slot] = generation
