"""The one large region of memory that the memory tier cuts into slabs."""

import ctypes
import fcntl
import logging
import mmap
import os
import threading

from remote_server.config import MiB, format_bytes

log = logging.getLogger(__name__)

_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it
_POPULATE_STEP_BYTES = 4 * MiB  # about 2 ms of page faults, during which we cannot be stopped


class Arena:
    """`num_bytes` of anonymous shared memory: a sealed memfd, mapped once.

    A memfd rather than a file in /dev/shm: it has no name, so nothing is left behind however
    this process ends, and the size of /dev/shm does not limit it (it does count as this
    process's memory, and against its cgroup). It is shared memory, rather than plain anonymous
    memory, so that `fd` can be passed to clients on this host, who then read blocks in place;
    the seals promise them that it will never shrink under a mapping of theirs.

    `view` is the whole region, writable. Pages appear when first touched, which is slow
    (1.8 GB/s against 19 once touched), so `populate` touches them all from a background thread
    and start-up time does not depend on `num_bytes`.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.fd = os.memfd_create("kvferry-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, num_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._map = mmap.mmap(self.fd, num_bytes)
        except BaseException:
            os.close(self.fd)
            raise
        self.view = memoryview(self._map)
        self._stop = threading.Event()
        self._populator: threading.Thread | None = None
        self._populated_bytes = 0

    @property
    def populated_bytes(self) -> int:
        """How far `populate` has come; equals `num_bytes` when it is done."""
        return self._populated_bytes

    def populate(self) -> None:
        """Start touching every page from a daemon thread, gently. Contents do not change."""
        self._populator = threading.Thread(target=self._populate, name="populate", daemon=True)
        self._populator.start()

    def close(self) -> None:
        """Stop populating and give the memory back.

        A view that someone still holds keeps the mapping alive until they let go of it.
        """
        self._stop.set()
        if self._populator is not None:
            self._populator.join()
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            log.debug("the arena is still in use; its memory goes with its last user")
        os.close(self.fd)

    def _populate(self) -> None:
        # This thread alone may starve nobody: on Linux, niceness is per thread.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        libc = ctypes.CDLL(None, use_errno=True)
        madvise = libc.madvise  # through ctypes, which lets go of the GIL meanwhile
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for start in range(0, self.num_bytes, _POPULATE_STEP_BYTES):
            if self._stop.is_set():
                return
            step = min(_POPULATE_STEP_BYTES, self.num_bytes - start)
            if madvise(address + start, step, _MADV_POPULATE_WRITE) != 0:
                self._touch(start, step)
            self._populated_bytes = start + step

    def _touch(self, start: int, step: int) -> None:
        """For kernels without MADV_POPULATE_WRITE: read one byte of each page.

        Reading, because writing could race with a block that is being copied in. A read of a
        shared mapping allocates the page all the same.
        """
        for offset in range(start, start + step, mmap.PAGESIZE):
            self.view[offset]


def warn_if_dev_shm_is_small(memory: int, folder: str = "/dev/shm") -> bool:
    """Warn, once, when engines on this host will run out of /dev/shm; says whether it did.

    The server does not need it, but an engine's CPU pool lives there, and a container gets
    64 MiB unless told otherwise.
    """
    try:
        stats = os.statvfs(folder)
    except OSError:
        return False
    total = stats.f_blocks * stats.f_frsize
    if total >= memory:
        return False
    log.warning(
        "%s holds %s, less than the memory budget of %s: this server does not need it, but "
        "engines on this host keep their CPU pool there; in a container pass --shm-size=%dg",
        folder, format_bytes(total), format_bytes(memory), -(-memory // (1 << 30)),
    )  # fmt: skip
    return True
