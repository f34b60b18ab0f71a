"""How many packs may be written at a time: one for each thread, headers not counted."""

from bucket_helpers import RealBucket

from remote_server.protocol import Stretch
from remote_server.store.bucket.opening import NUM_THREADS

PACK_BYTES = 16 << 20


def test_each_thread_has_a_pack_of_the_default_size_to_write():
    with RealBucket() as bucket:
        begun = []
        while bucket.tier.room_for([PACK_BYTES]):
            key = b"%d" % len(begun)
            begun += bucket.tier.begin_puts(
                "ns", [key], PACK_BYTES, [PACK_BYTES], [0], [Stretch(1, 0, 0, 1024)]
            )
        assert len({block.pack.key for block in begun}) == NUM_THREADS
        for block in begun:
            bucket.tier.fail_put(block)
