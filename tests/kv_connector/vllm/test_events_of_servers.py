"""vLLM's own subscriber reads a server's events as it reads an engine's."""

import msgspec
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from remote_server.server.reports.kv_events import Feed
from remote_server.store.presence import News, Presence, hash_of

KEY = bytes(range(32)) + (2).to_bytes(4, "big")


def test_its_batches_are_those_of_vllm():
    context, decoder = zmq.Context(), msgspec.msgpack.Decoder(type=KVEventBatch)
    source, now = Presence([]), [0.0]
    feed = Feed(context, "tcp://127.0.0.1:*", "one", {"": source}, lambda: now[0])
    try:
        block = [KEY], [hash_of(KEY)]
        source.news += [News("ns", 2, 16, True, *block), News("ns", 2, 0, False, *block)]
        now[0] = 1.0
        feed.take_turn()
        batches = [decoder.decode(body) for _, _, body in feed._kept]
    finally:
        feed.close()
        context.destroy(linger=0)
    (cleared,), (stored, removed) = (batch.events for batch in batches)
    number = int.from_bytes(bytes(range(24, 32)), "big")
    where = {"medium": "STORAGE", "group_idx": 2, "locality": "REMOTE", "ownership": "one"}
    assert cleared == AllBlocksCleared()
    assert stored == BlockStored(
        block_hashes=[number], parent_block_hash=None, token_ids=[], block_size=16, lora_id=None,
        lora_name=None, **where,
    )  # fmt: skip
    assert removed == BlockRemoved(block_hashes=[number], **where)
