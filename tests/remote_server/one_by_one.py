"""A tier's calls for one key, in terms of its calls for many."""

from typing import Any

from remote_server.protocol import KeyState
from remote_server.store.memory.slabs import BlockState
from remote_server.store.tier import Offered


class OneByOne:
    """`tier`, which is the memory tier or a `Tier`, with a call for one key beside each."""

    def __init__(self, tier: Any) -> None:
        self.tier = tier

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tier, name)

    def lookup(self, namespace, key):
        return KeyState(self.lookup_all(namespace, (key,))[0])

    def begin_put(self, namespace, key, block_bytes, length, checksum):
        blocks = self.begin_puts(Offered(namespace, [key], [length], [checksum]), block_bytes)
        return blocks[0] if blocks else None

    def complete_put(self, block):
        self.complete_puts([block])
        return block.state is BlockState.READABLE

    def pin(self, namespace, key):
        return self.pin_all(namespace, (key,))[0]

    def unpin(self, block):
        self.unpin_all((block,))

    def touch(self, namespace, key):
        return self.touch_all(namespace, (key,)) == 1
