"""A proxy of `http_faults.py` in a process of its own, for servers under test.

with StoreProxy("127.0.0.1:9000") as proxy:           # the store
    proxy.set(StoreFaults(status=503, code="SlowDown"))
    proxy.clear()
"""

import asyncio
import sys
import threading
from collections import Counter
from typing import Any

from http_faults import CLEAR, HttpProxy, StoreFaults
from owned_process import OwnedProcess, serve


class StoreProxy(OwnedProcess):
    """Listens on `address`, host and port, and forwards to `target`. One thread may call it."""

    def __init__(self, target: str, seed: int = 0) -> None:
        super().__init__(__file__, target, str(seed))

    def set(self, faults: StoreFaults) -> None:
        """From the return of this call on. What was held or caught goes on."""
        self.call("set", faults)

    def clear(self) -> None:
        """Everything passes, unharmed."""
        self.set(CLEAR)

    def counts(self) -> Counter[str]:
        """What was done to how many requests."""
        return Counter(self.call("counts"))


def _run(target: str, seed: int) -> None:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def begin() -> tuple[HttpProxy, str]:
        proxy = HttpProxy(target, seed)
        return proxy, await proxy.listen()

    proxy, address = asyncio.run_coroutine_threadsafe(begin(), loop).result()

    def do(name: str, *arguments: Any) -> object:
        return asyncio.run_coroutine_threadsafe(getattr(proxy, name)(*arguments), loop).result()

    serve(address, do)


if __name__ == "__main__":
    _run(sys.argv[1], int(sys.argv[2]))
