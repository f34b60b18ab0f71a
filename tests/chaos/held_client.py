"""A client in a process of its own, whose interpreter is held while the answers to its gets come.

    python held_client.py ENDPOINT HOLD_S

Prints "ready"; asks for blocks when it reads a line; prints "asked", and holds the interpreter in a
C call for HOLD_S seconds, as an extension does that keeps the GIL. No Python runs meanwhile, and
libzmq's own thread does. Afterwards every get has ended, and the same client gets blocks again.
"""

import ctypes
import sys
import time

from chaos_client import ChaosClient
from oracle import LARGE

NUM_GETS = 8
BLOCKS = tuple(range(3 * NUM_GETS))
"""More messages than a receive mark of 8 lets in, and less than the client's window."""

_TIMEOUT_S = 20.0

_hold_us = ctypes.PyDLL(None).usleep
_hold_us.argtypes = [ctypes.c_uint]


def main() -> None:
    endpoint, hold_s = sys.argv[1], float(sys.argv[2])
    client = ChaosClient(endpoint, "tcp", num_pieces=NUM_GETS)
    client.wait_until_ready()
    print("ready", flush=True)
    sys.stdin.readline()
    requests = [client.get(LARGE, BLOCKS[first : first + 3], _TIMEOUT_S) for first in BLOCKS[::3]]
    time.sleep(0.2)  # the client's thread sends them
    print("asked", flush=True)
    _hold_us(int(hold_s * 1e6))
    for request in requests:
        client.finish(request)
    # One of its connections may learn of the reset later than the others.
    ends_at, word = time.monotonic() + _TIMEOUT_S, "unavailable"
    while word == "unavailable" and time.monotonic() < ends_at:
        client.wait_until_ready()
        word = client.finish(client.get(LARGE, BLOCKS[:3], _TIMEOUT_S))
    assert word == "hit", word
    client.check()
    client.close()


if __name__ == "__main__":
    main()
