"""A follower of a server's or an engine's KV events, written from the documents of their format
alone: msgpack, and none of the project's structs."""

from collections.abc import Iterable
from typing import Any

import msgpack
import zmq
from lent import lent

PATIENCE_MS = 60_000
END = b"\xff" * 8


ARRAYS = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
        "lora_name", "extra_keys", "group_idx",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}  # fmt: skip
"""The places of an event that is an array, behind its type. llm-d reads those up to `lora_name`,
Dynamo all."""


def by_name(event: list[Any]) -> dict[str, Any]:
    """An event that is an array, with the names of its fields."""
    kind, *values = event
    return {"type": kind, **dict(zip(ARRAYS[kind], values, strict=True))}


class Picture:
    """What a router believes of one publisher, by topic."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, set[int]] = {}
        self.next_number = 0
        self.has_gap = True
        """It knows that it does not know all: until the publisher's first batch, and from a gap."""

    def take(self, topic: bytes, number: bytes, payload: bytes) -> None:
        at = int.from_bytes(number, "big")
        if at < self.next_number:
            return  # known, from a replay
        self.has_gap |= at > self.next_number
        self.next_number = at + 1
        time_s, events, *_ = msgpack.unpackb(payload)
        assert isinstance(time_s, float)
        for event in events:
            self._apply(topic, event if isinstance(event, dict) else by_name(event))

    def _apply(self, topic: bytes, event: dict[str, Any]) -> None:
        match event["type"]:
            case "BlockStored":
                blocks = self.blocks.setdefault(topic, set())
                twice = not blocks.isdisjoint(event["block_hashes"])
                assert self.has_gap or not twice, "announced twice"
                blocks.update(event["block_hashes"])
            case "BlockRemoved":
                blocks = self.blocks.setdefault(topic, set())
                unknown = not blocks.issuperset(event["block_hashes"])
                assert self.has_gap or not unknown, "never announced"
                blocks.difference_update(event["block_hashes"])
            case "AllBlocksCleared":
                self.blocks.clear()
                self.has_gap = False
            case other:
                raise AssertionError(other)


class Follower:
    """Subscribed to everything, with replays of what it missed."""

    def __init__(self, context: zmq.Context, endpoint: str, replay: str = "") -> None:
        self.picture = Picture()
        self._subscriber = lent(context.socket(zmq.SUB))
        self._subscriber.subscribe(b"")
        self._subscriber.rcvhwm = 0
        self._subscriber.connect(endpoint)
        self._asker = None
        if replay:
            self._asker = lent(context.socket(zmq.DEALER))
            self._asker.rcvhwm = 0
            self._asker.connect(replay)

    def read(self, *, patience_ms: int = PATIENCE_MS) -> bool:
        """Take the next batch, after what is missing before it. False if none came in that time."""
        if not self._subscriber.poll(patience_ms):
            return False
        topic, number, payload = self._subscriber.recv_multipart()
        picture = self.picture
        if self._asker is not None and int.from_bytes(number, "big") > picture.next_number:
            for batch in self.replayed(picture.next_number):
                picture.take(*batch)
        picture.take(topic, number, payload)
        return True

    def replayed(self, first: int) -> Iterable[tuple[bytes, bytes, bytes]]:
        """The batches from this number on, as the publisher has kept them."""
        assert self._asker is not None
        self._asker.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            assert self._asker.poll(PATIENCE_MS), "the replay has no end"
            _, topic, number, payload = self._asker.recv_multipart()
            if number == END:
                return
            yield topic, number, payload
