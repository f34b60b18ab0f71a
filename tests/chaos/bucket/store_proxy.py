"""A proxy of `http_faults.py` in a process of its own, for servers under test.

with StoreProxy("127.0.0.1:9000") as proxy:           # the store
    proxy.set(StoreFaults(status=503, code="SlowDown"))
    proxy.clear()
"""

import asyncio
import threading
from collections import Counter

from http_faults import CLEAR, HttpProxy, StoreFaults
from owned_process import OwnedProcess


class StoreProxy(OwnedProcess):
    """Listens on `address`, host and port, and forwards to `target`."""

    def __init__(self, target: str, seed: int = 0) -> None:
        super().__init__(_Proxy, target, seed)
        self.address: str = self._call("do", "listen")

    def set(self, faults: StoreFaults) -> None:
        """From the return of this call on. What was held or caught goes on."""
        self._call("do", "set", faults)

    def clear(self) -> None:
        """Everything passes, unharmed."""
        self.set(CLEAR)

    def counts(self) -> Counter[str]:
        """What was done to how many requests."""
        return Counter(self._call("do", "counts"))


class _Proxy:
    """The proxy and its loop, in that process."""

    def __init__(self, target: str, seed: int) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._proxy = HttpProxy(target, seed)

    def do(self, name: str, *arguments: object) -> object:
        coroutine = getattr(self._proxy, name)(*arguments)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
