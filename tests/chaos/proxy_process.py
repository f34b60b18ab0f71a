"""A fault proxy in a process of its own, for an engine under test.

A `FaultProxy` in the test's process shares its interpreter with the test: while the test computes
or waits for the interpreter, everything on the way stands still, and healthy lookups are late.

    with ProxyProcess(server.endpoint) as proxy:
        proxy.set(Faults(swallowed=BOTH))
        proxy.clear()
"""

import sys
from typing import Any

from fault_proxy import FaultProxy
from faults import CLEAR, Faults
from owned_process import OwnedProcess, serve


class ProxyProcess(OwnedProcess):
    """Listens on `endpoint` and forwards to `target`. One thread at a time may call it."""

    def __init__(self, target: str, seed: int = 0) -> None:
        super().__init__(__file__, target, str(seed))
        self.endpoint = self.address

    def set(self, faults: Faults) -> None:
        """What happens to everything that comes by, from the return of this call on."""
        self.call("set", faults)

    def clear(self) -> None:
        """Everything passes, unharmed."""
        self.set(CLEAR)

    def reset_connections(self) -> None:
        """End every connection as a broken network does."""
        self.call("reset_connections")

    def aim(self, target: str) -> None:
        """Forward new connections to `target`."""
        self.call("aim", target)

    def count(self, what: str) -> int:
        """`FaultProxy.counts`: what was done to how many units."""
        return int(self.call("count", what))


def _run(target: str, seed: int) -> None:
    with FaultProxy(target, seed) as proxy:

        def do(name: str, *arguments: Any) -> object:
            match name:
                case "aim":
                    (proxy.target,) = arguments
                    return None
                case "count":
                    (what,) = arguments
                    return proxy.counts[what]
                case _:
                    return getattr(proxy, name)(*arguments)

        serve(proxy.endpoint, do)


if __name__ == "__main__":
    _run(sys.argv[1], int(sys.argv[2]))
