"""A scorer for a router: the engine that would answer a prompt at the least cost.

    engines = [Engine("a", "tcp://10.0.0.1:5557"), Engine("b", "tcp://10.0.0.2:5557")]
    with Locator("tcp://10.0.0.7:5757") as locator:
        chosen = choose(engines, tokens, on_servers(locator, tokens))

Three things decide: the tokens that an engine has in its own cache or in its CPU pool, by its
events; those that it would load from a server, which is as far from every engine; and the work that
waits in its queue. The router adds `work_s` of a prompt that it sends to `queued_s`, and takes it
off when the first token has come.
"""

from collections.abc import Sequence
from typing import Any

import msgpack
import zmq

from remote_server.fleet.locator import Locator

_LOCAL = ("GPU", "CPU")

WORK_COUNTS = 5
"""How much more the work for a prompt counts than its wait: that work delays all prompts behind it.
With 1 each prompt's own first token comes soonest, and engines that are overloaded compute what
others have. `benchmarks/remote_kv_cache/test_routing.py` compares."""


class Engine:
    """What a router knows of one engine."""

    def __init__(
        self,
        name: str,
        events: str | None = None,
        *,
        computes_per_s: float = 10_000.0,
        loads_per_s: float = 100_000.0,
    ) -> None:
        """`events` is where it publishes vLLM's KV events; None: `apply` is called with each.
        Speeds are in tokens; measure them."""
        self.name = name
        self.computes_per_s = computes_per_s
        self.loads_per_s = loads_per_s
        self.queued_s = 0.0
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.SUB)
        self._socket.linger = 0
        self._socket.subscribe(b"")
        if events is not None:
            self._socket.connect(events)
        self._next: int | None = None
        self._hashes: dict[tuple[int | None, tuple[int, ...]], int] = {}
        """The hash of a block, by that of the block before it and its tokens."""
        self._content: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self._places: dict[int, set[str]] = {}
        """Where each block is."""

    def read_events(self) -> None:
        """Take what has come. After a gap nothing is known, and blocks are learned anew."""
        while self._socket.poll(0):
            _, number, payload = self._socket.recv_multipart()
            at = int.from_bytes(number, "big")
            if self._next not in (None, at):
                self._forget()
            self._next = at + 1
            for event in msgpack.unpackb(payload)[1]:
                self.apply(event)

    def apply(self, event: dict[str, Any]) -> None:
        """One event, as a map."""
        if event["type"] == "AllBlocksCleared":
            self._forget()
        elif event["medium"] not in _LOCAL:
            return
        elif event["type"] == "BlockRemoved":
            for block in event["block_hashes"]:
                places = self._places.get(block, set())
                places.discard(event["medium"])
                if not places:
                    self._places.pop(block, None)
                    self._hashes.pop(self._content.pop(block, (None, ())), None)
        else:
            parent: int | None = event["parent_block_hash"]
            size: int = event["block_size"]
            for number, block in enumerate(event["block_hashes"]):
                content = parent, tuple(event["token_ids"][number * size : (number + 1) * size])
                self._hashes[content], self._content[block] = block, content
                self._places.setdefault(block, set()).add(event["medium"])
                parent = block

    def _forget(self) -> None:
        self._hashes, self._content, self._places = {}, {}, {}

    def cached(self, tokens: Sequence[int]) -> int:
        """Tokens of the prompt, from the first, that it has."""
        size = next((len(block) for _, block in self._hashes if block), 0)
        known: int | None = None
        found = 0
        while size and (block := tuple(tokens[found : found + size])):
            known = self._hashes.get((known, block))
            if known is None:
                break
            found += size
        return found

    def work_s(self, tokens: Sequence[int], readable: int) -> float:
        """What it takes to compute or load this prompt, of which servers have the first `readable`
        tokens."""
        cached = self.cached(tokens)
        loaded = max(0, readable - cached)
        return (len(tokens) - cached - loaded) / self.computes_per_s + loaded / self.loads_per_s

    def cost_s(self, tokens: Sequence[int], readable: int) -> float:
        """The wait of this prompt, and its work, which those behind it wait for."""
        return self.queued_s + WORK_COUNTS * self.work_s(tokens, readable)

    def close(self) -> None:
        self._socket.close()


def on_servers(locator: Locator, tokens: Sequence[int], namespace: str | None = None) -> int:
    """Tokens of the prompt, from the first, that the servers have; 0 if none answers in time."""
    found = locator.locate(tokens=tokens, namespace=namespace, timeout_s=0.05)
    return max((prefix.tokens for prefix in found.namespaces.values()), default=0)


def choose(engines: Sequence[Engine], tokens: Sequence[int], readable: int) -> Engine:
    """The engine for this prompt; the first of those that are equal."""
    return min(engines, key=lambda engine: engine.cost_s(tokens, readable))
