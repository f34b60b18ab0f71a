"""A proxy of `http_faults.py` in a process of its own, for servers under test.

    with StoreProxy("127.0.0.1:9000") as proxy:           # the store
        proxy.set(StoreFaults(status=503, code="SlowDown"))
        proxy.clear()

It ends with its input, so it never outlives the test.
"""

import asyncio
import contextlib
import pickle
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

from http_faults import CLEAR, HttpProxy, StoreFaults

_GRACE_S = 15.0


class StoreProxy:
    """Listens on `address`, host and port, and forwards to `target`. One thread may call it."""

    def __init__(self, target: str, seed: int = 0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), target, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.address: str = self._answer()

    def set(self, faults: StoreFaults) -> None:
        """From the return of this call on. What was held or caught goes on."""
        self._call("set", faults)

    def clear(self) -> None:
        """Everything passes, unharmed."""
        self.set(CLEAR)

    def counts(self) -> Counter[str]:
        """What was done to how many requests."""
        return Counter(self._call("counts"))

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(_GRACE_S)
        finally:
            self._process.kill()
            self._process.wait()
            cast(BinaryIO, self._process.stdout).close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, name: str, *arguments: Any) -> Any:
        pipe = cast(BinaryIO, self._process.stdin)
        pickle.dump((name, arguments), pipe)
        pipe.flush()
        return self._answer()

    def _answer(self) -> Any:
        return pickle.load(cast(BinaryIO, self._process.stdout))


def _run(target: str, seed: int) -> None:
    """Do what the input has, one call after the other, until it ends."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def begin() -> tuple[HttpProxy, str]:
        proxy = HttpProxy(target, seed)
        return proxy, await proxy.listen()

    proxy, address = asyncio.run_coroutine_threadsafe(begin(), loop).result()
    _say(address)
    with contextlib.suppress(EOFError):
        while True:
            name, arguments = pickle.load(sys.stdin.buffer)
            call = getattr(proxy, name)(*arguments)
            _say(asyncio.run_coroutine_threadsafe(call, loop).result())


def _say(answer: object) -> None:
    pickle.dump(answer, sys.stdout.buffer)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    _run(sys.argv[1], int(sys.argv[2]))
