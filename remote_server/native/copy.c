/* Pieces of a block: hashed, copied, or both in one pass, with the instruction set that was chosen. */

#include "bytes.h"

#include <string.h>

/* Streams whole cache lines of the target; the bytes before the first and after the last are stored as usual. */
static void stream(uint8_t *target, const uint8_t *source, size_t size)
{
    size_t head = kvf_least(-(uintptr_t)target % KVF_STRIPE, size), lines = (size - head) / KVF_STRIPE;
    size_t done = head + lines * KVF_STRIPE;
    memcpy(target, source, head);
    kvf_stripes->stream(target + head, source + head, lines);
    memcpy(target + done, source + done, size - done);
}

/* Hashes a piece, and copies it where `target` is not NULL, up to the end of the block: the number of bytes. */
static size_t hash_and_copy(struct kvf_hash *hash, uint8_t *target, const uint8_t *source, size_t size, bool streams)
{
    size = kvf_least(size, hash->length - hash->taken);
    if (!size)
        return 0;
    bool is_long = hash->length > KVF_SHORT_MOST;
    size_t done = 0;
    if (is_long) {
        /* Whole ones; that at the end of the block is hashed after all others. */
        size_t left = (hash->length - 1) / KVF_STRIPE - hash->taken / KVF_STRIPE;
        size_t stripes = kvf_least(size / KVF_STRIPE, left);
        enum kvf_store store = target ? KVF_STORED : KVF_UNSTORED;
        /* By way of a buffer an unaligned target could be streamed to; that took 1.1 to 1.2 times as long. */
        if (target && streams && (uintptr_t)target % KVF_STRIPE == 0)
            store = KVF_STREAMED;
        kvf_stripes->hash(hash, target, source, stripes, store);
        done = stripes * KVF_STRIPE;
    }
    /* A short block, or the bytes of a piece after its whole stripes, at most 64, go by way of the state, which needs
     * them at the end. */
    uint8_t *kept = hash->kept + (is_long ? KVF_STRIPE : hash->taken);
    memcpy(kept, source + done, size - done);
    if (target)
        memcpy(target + done, kept, size - done);
    hash->taken += size;
    return size;
}

void kvf_hash_piece(struct kvf_hash *hash, const uint8_t *source, size_t size)
{
    hash_and_copy(hash, NULL, source, size, false);
}

void kvf_copy_piece(struct kvf_hash *hash, uint8_t *target, const uint8_t *source, size_t size, bool streams)
{
    size_t hashed = hash ? hash_and_copy(hash, target, source, size, streams) : 0;
    if (hashed < size && streams)
        stream(target + hashed, source + hashed, size - hashed);
    else if (hashed < size)
        memcpy(target + hashed, source + hashed, size - hashed);
#if defined(__x86_64__)
    if (streams)
        __builtin_ia32_sfence();
#endif
}
