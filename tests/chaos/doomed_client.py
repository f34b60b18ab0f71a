"""A client in a process of its own, which its parent kills in the middle of a request.

    python doomed_client.py ENDPOINT TRANSPORT OP

Prints "ready", begins the request when it reads a line, and waits for its end, which never comes.
"""

import signal
import sys

from chaos_client import ChaosClient
from phases import PHASES


def main() -> None:
    endpoint, transport, op = sys.argv[1:]
    client = ChaosClient(endpoint, transport)
    client.wait_until_ready()
    phase = next(phase for phase in PHASES if (phase.transport, phase.op) == (transport, op))
    phase.prepare(client)
    print("ready", flush=True)
    sys.stdin.readline()
    phase.begin(client, timeout_s=300).wait()
    signal.pause()


if __name__ == "__main__":
    main()
