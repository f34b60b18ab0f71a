/* Pieces of a block: hashed, copied, or both in one pass, with the instruction set that was chosen. */

#include "bytes.h"

#include <string.h>

static const struct kvf_stripes *chosen; /* set at load, before any thread of this library */

static __attribute__((constructor)) void choose(void)
{
    chosen = kvf_stripes_named(NULL);
}

const char *kvf_instructions(void)
{
    return chosen->name;
}

int kvf_use_instructions(const char *name)
{
    const struct kvf_stripes *named = kvf_stripes_named(name);
    if (!named)
        return -1;
    chosen = named;
    return 0;
}

/* Streams whole cache lines of the target; the bytes before the first and after the last are stored as usual. */
static void stream(uint8_t *target, const uint8_t *source, size_t size)
{
    size_t head = -(uintptr_t)target % KVF_STRIPE;
    if (size < head + KVF_STRIPE) {
        memcpy(target, source, size);
        return;
    }
    memcpy(target, source, head);
    size_t lines = (size - head) / KVF_STRIPE;
    chosen->stream(target + head, source + head, lines);
    head += lines * KVF_STRIPE;
    memcpy(target + head, source + head, size - head);
}

/* The bytes of a piece after its whole stripes go by way of the state, which needs them at the end. */
static void keep(uint8_t *kept, uint8_t *target, const uint8_t *source, size_t size)
{
    memcpy(kept, source, size);
    if (target)
        memcpy(target, kept, size);
}

static void hash_and_copy(struct kvf_hash *hash, uint8_t *target, const uint8_t *source, size_t size, bool streams)
{
    if (!size)
        return;
    if (hash->length <= KVF_SHORT_MOST) {
        keep(hash->kept + hash->taken, target, source, size);
        hash->taken += size;
        return;
    }
    size_t stripes = size / KVF_STRIPE;
    if (stripes > hash->stripes_left)
        stripes = hash->stripes_left;
    if (!target)
        chosen->hash(hash, source, stripes);
    else if (streams && (uintptr_t)target % KVF_STRIPE == 0)
        chosen->hash_stream(hash, target, source, stripes);
    else /* by way of a buffer an unaligned target could be streamed to; that took 1.1 to 1.2 times as long */
        chosen->hash_store(hash, target, source, stripes);
    size_t done = stripes * KVF_STRIPE; /* at most 64 bytes are left: see kvf_hash_begin */
    keep(hash->kept + KVF_STRIPE, target ? target + done : NULL, source + done, size - done);
    hash->stripes_left -= stripes;
    hash->taken += size;
}

void kvf_hash_piece(struct kvf_hash *hash, const uint8_t *source, size_t size)
{
    uint64_t missing = hash->length - hash->taken;
    hash_and_copy(hash, NULL, source, size < missing ? size : missing, false);
}

void kvf_copy_piece(struct kvf_hash *hash, uint8_t *target, const uint8_t *source, size_t size, bool streams)
{
    size_t hashed = 0;
    if (hash) {
        uint64_t missing = hash->length - hash->taken;
        hashed = size < missing ? size : missing;
        hash_and_copy(hash, target, source, hashed, streams);
    }
    if (hashed < size) {
        if (streams)
            stream(target + hashed, source + hashed, size - hashed);
        else
            memcpy(target + hashed, source + hashed, size - hashed);
    }
    if (streams)
        kvf_fence();
}
