"""A network link with delay and loss, in a network namespace of its own.

Packets to `FAR` go through a tun device to a process that drops some, waits, and gives the others
back with both addresses exchanged: they arrive at `NEAR`, from `FAR`. TCP sees a link, with its own
control of congestion. The kernel's netem is not needed, which many kernels lack.
"""

import contextlib
import ctypes
import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.harness.runner import Skipped

NEAR, FAR = "10.99.0.1", "10.99.0.2"
"""Servers listen at the first; clients connect to the second."""

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_DEVICE = "kvferry0"
_MTU = 1500
_MOST_WAITING = 2000
"""Packets on the way; more are dropped, as in a router's queue."""


def enter() -> int:
    """Move this process into a namespace with such a link, and return the descriptor of its device.

    Call it before the first thread. Raises `Skipped` where that is not permitted.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        raise Skipped(f"no network namespace: {os.strerror(ctypes.get_errno())}")
    try:
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
        fcntl.ioctl(
            tun, _TUNSETIFF, struct.pack("16sH22x", _DEVICE.encode(), _IFF_TUN | _IFF_NO_PI)
        )
        for command in (
            ["link", "set", "lo", "up"],
            ["addr", "add", f"{NEAR}/24", "dev", _DEVICE],
            ["link", "set", _DEVICE, "mtu", str(_MTU), "up"],
        ):
            subprocess.run(["ip", *command], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Skipped(f"no tun device: {error}") from None
    return tun


@contextmanager
def link(tun: int, one_way_s: float, loss: float) -> Iterator[None]:
    """The link is there in the block: another process carries its packets."""
    command = [sys.executable, "-m", __name__, str(tun), str(one_way_s), str(loss)]
    process = subprocess.Popen(command, pass_fds=[tun])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def carry(tun: int, one_way_s: float, loss: float) -> None:
    """Until the process ends."""
    rng = random.Random(23)
    waiting: deque[tuple[float, bytes]] = deque()
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        if select.select([tun], [], [], timeout)[0]:
            packet = os.read(tun, 1 << 16)
            if packet[0] >> 4 == 4 and rng.random() >= loss and len(waiting) < _MOST_WAITING:
                # The checksums do not change with the order of the addresses.
                turned = packet[:12] + packet[16:20] + packet[12:16] + packet[20:]
                waiting.append((time.monotonic() + one_way_s, turned))
        while waiting and waiting[0][0] <= time.monotonic():
            with contextlib.suppress(OSError):
                os.write(tun, waiting.popleft()[1])


if __name__ == "__main__":
    carry(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
