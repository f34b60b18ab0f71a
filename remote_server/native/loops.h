/* The loops over stripes of XXH3, of one instruction set; they also store what they have loaded.
 *
 * Each lane sums a product of 32-bit halves and its neighbour's value. One stripe's load, arithmetic and store share
 * the registers, so a checked copy reads memory as often as a plain one.
 *
 * A file for an instruction set includes this one after it has defined the type `vector`, of one or more lanes, and
 *
 *     SET, NAME           the set's name in C and its name
 *     ON                  the attribute of functions that use its instructions
 *     NUMBERS(vector)     the numbers of its little-endian bytes
 *     TIMES(one, other)   the products of their lower halves
 *     NEIGHBOURS(vector)  each number in the place of its neighbour, of those in the same vector
 *     NEIGHBOUR           1 where the neighbours are in the next vector or the one before, else 0
 *     STREAM(to, vector)  stores it past the caches */

#include "bytes.h"

#define INLINE static inline __attribute__((always_inline))

typedef vector anywhere __attribute__((aligned(1), may_alias));

enum { VECTORS = KVF_STRIPE / sizeof(vector), PAGE_STRIPES = 4096 / KVF_STRIPE };

/* Volatile: the compiler may neither read the source a second time nor use narrower vectors. */
ON INLINE vector load(const uint8_t *source)
{
    return *(const volatile anywhere *)source;
}

/* One stripe, at an offset of source and target. `kept` is NULL or takes its bytes too. */
ON INLINE void stripe(vector lanes[VECTORS], uint8_t *target, uint8_t *kept, const uint8_t *source, size_t offset,
                      const uint8_t *secret, enum kvf_store store)
{
    for (size_t i = 0; i < VECTORS; i++) {
        size_t at = i * sizeof(vector);
        vector value = load(source + offset + at);
        if (store == KVF_STREAMED)
            STREAM(target + offset + at, value);
        if (store == KVF_STORED)
            *(anywhere *)(target + offset + at) = value;
        if (kept)
            *(anywhere *)(kept + at) = value;
        vector key = NUMBERS(value) ^ NUMBERS(*(const anywhere *)(secret + at));
        lanes[i ^ NEIGHBOUR] += NEIGHBOURS(NUMBERS(value));
        lanes[i] += TIMES(key, key >> 32);
    }
}

ON INLINE void scramble(vector lanes[VECTORS], const uint8_t *secret)
{
    const vector prime = (vector){0} + KVF_PRIME32_1;
    for (size_t i = 0; i < VECTORS; i++) {
        lanes[i] ^= lanes[i] >> 47 ^ NUMBERS(*(const anywhere *)(secret + i * sizeof(vector)));
        lanes[i] = TIMES(lanes[i], prime) + (TIMES(lanes[i] >> 32, prime) << 32);
    }
}

/* Before each page of a target, loads a line of the page after the next, and with it the address translation. Without
 * it the first streaming store there waits: 560 KiB to 4 MiB blocks took 0.69 to 0.63 of a memcpy, with it 0.63 to 0.57
 * (pages of 2 MiB: 0.80 to 0.67, 0.64 to 0.54). */
INLINE void before(const uint8_t *target, size_t at, size_t stripes)
{
    if (at % PAGE_STRIPES == 0 && stripes - at > 2 * PAGE_STRIPES)
        __builtin_prefetch(target + (at + 2 * PAGE_STRIPES) * KVF_STRIPE);
}

/* `count` stripes from stripe `at` on, up to the end of a block of them. `kept` is NULL or takes the last one.
 *
 * Where the next block follows, a stream loads it ahead: on Zen 3, with pages of 4 KiB and of 2 MiB, 64 KiB to 4 MiB
 * took 0.97 to 0.83 of the time. Copies by way of the caches gained nothing from memory, and lost 0.05 within them. */
ON INLINE void block(struct kvf_hash *hash, vector lanes[VECTORS], uint8_t *target, uint8_t *kept,
                     const uint8_t *source, size_t at, size_t count, enum kvf_store store)
{
    for (size_t n = 0; n < count; n++) {
        if (!kept && store == KVF_STREAMED)
            __builtin_prefetch(source + (at + n + KVF_BLOCK_STRIPES) * KVF_STRIPE);
        stripe(lanes, target, n + 1 == count ? kept : NULL, source, (at + n) * KVF_STRIPE, hash->secret + 8 * n, store);
    }
    if (count == KVF_BLOCK_STRIPES)
        scramble(lanes, hash->secret + KVF_SECRET - KVF_STRIPE);
}

ON INLINE void run(struct kvf_hash *hash, uint8_t *target, const uint8_t *source, size_t stripes, enum kvf_store store)
{
    vector lanes[VECTORS];
    for (size_t i = 0; i < VECTORS; i++)
        lanes[i] = ((const anywhere *)hash->lanes)[i];
    size_t at = 0;
    for (; stripes - at > KVF_BLOCK_STRIPES; at += KVF_BLOCK_STRIPES) {
        if (store)
            before(target, at, stripes);
        block(hash, lanes, target, NULL, source, at, KVF_BLOCK_STRIPES, store);
    }
    if (stripes)
        block(hash, lanes, target, hash->kept, source, at, stripes - at, store);
    for (size_t i = 0; i < VECTORS; i++)
        ((anywhere *)hash->lanes)[i] = lanes[i];
}

ON static void hash(struct kvf_hash *hash, uint8_t *target, const uint8_t *source, size_t stripes, enum kvf_store store)
{
    if (store == KVF_STREAMED)
        run(hash, target, source, stripes, KVF_STREAMED);
    else if (store == KVF_STORED)
        run(hash, target, source, stripes, KVF_STORED);
    else
        run(hash, NULL, source, stripes, KVF_UNSTORED);
}

ON static void stream(uint8_t *target, const uint8_t *source, size_t stripes)
{
    for (size_t n = 0; n < stripes; n++) {
        before(target, n, stripes);
        for (size_t i = 0; i < VECTORS; i++) {
            size_t at = n * KVF_STRIPE + i * sizeof(vector);
            STREAM(target + at, load(source + at));
        }
    }
}

const struct kvf_stripes SET = {NAME, hash, stream};
