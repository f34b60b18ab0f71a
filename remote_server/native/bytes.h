/* Bytes on their way: XXH3-64 of a block that passes in pieces, and copies that hash what they copy. */

#ifndef KVF_BYTES_H
#define KVF_BYTES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    KVF_STRIPE = 64,        /* XXH3 takes a long block in stripes, each a cache line */
    KVF_BLOCK_STRIPES = 16, /* after so many stripes it scrambles its lanes */
    KVF_SECRET = 192,
    KVF_SHORT_MOST = 240, /* blocks up to this length have forms of their own */
};

/* A hash over pieces. The caller owns it; it points to nothing, so it may be moved and dropped at any time. */
struct kvf_hash {
    uint64_t lanes[8];
    uint64_t length;       /* of the whole block */
    uint64_t taken;        /* bytes of it so far */
    uint64_t seed;
    uint8_t secret[KVF_SECRET];
    uint8_t kept[256]; /* a short block; of a long one the last whole stripe (64 bytes), then the bytes after it */
};

/* `length` is that of the whole block. A digest is meaningful after pieces of that length in all. */
void kvf_hash_begin(struct kvf_hash *hash, uint64_t seed, uint64_t length);

/* Pieces come in order; all but the last are multiples of 4096 bytes. Bytes past `length` are not hashed. */
void kvf_hash_piece(struct kvf_hash *hash, const uint8_t *source, size_t size);

uint64_t kvf_hash_end(const struct kvf_hash *hash);

/* Copies a piece and hashes it (`hash` may be NULL). Any alignment; source and target do not overlap.
 *
 * The source is read once. So the digest is that of the bytes that were stored, even if another process changes the
 * source meanwhile. `stream` stores past the caches, and with a hash only where the target is at a multiple of 64;
 * those stores are complete (fenced) when the call returns. */
void kvf_copy_piece(struct kvf_hash *hash, uint8_t *target, const uint8_t *source, size_t size, bool stream);

/* XXH3-64 of one block. */
uint64_t kvf_xxh3(const void *source, size_t size, uint64_t seed);

/* The instruction set in use: "avx512", "avx2" or "plain". The best that the processor has is chosen at load. */
const char *kvf_instructions(void);

/* Chooses another one: 0, or -1 if the processor lacks it. Not while another thread hashes or copies. */
int kvf_use_instructions(const char *name);

enum kvf_store { KVF_UNSTORED, KVF_STORED, KVF_STREAMED };

/* The loops over whole stripes for one instruction set. Each reads every byte of the source once.
 *
 * `hash` begins at a multiple of KVF_BLOCK_STRIPES stripes of the block, and leaves the last stripe in `hash->kept`.
 * Streams need a target at a multiple of 64, and end without a fence. */
struct kvf_stripes {
    const char *name;
    void (*hash)(struct kvf_hash *hash, uint8_t *target, const uint8_t *source, size_t stripes, enum kvf_store store);
    void (*stream)(uint8_t *target, const uint8_t *source, size_t stripes);
};

#define KVF_HIDDEN __attribute__((visibility("hidden")))

KVF_HIDDEN extern const struct kvf_stripes kvf_plain, kvf_avx2, kvf_avx512, *kvf_stripes; /* the chosen one */
KVF_HIDDEN void kvf_stripe(uint64_t lanes[8], const uint8_t *source, const uint8_t *secret); /* one, in plain C */

static inline uint64_t kvf_least(uint64_t one, uint64_t other)
{
    return one < other ? one : other;
}

/* The bytes of a block are little-endian numbers, on every processor. */
static inline uint64_t kvf_little_64(uint64_t number)
{
    return __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__ ? __builtin_bswap64(number) : number;
}

static inline uint64_t kvf_load_64(const uint8_t *source)
{
    uint64_t number;
    __builtin_memcpy(&number, source, sizeof number);
    return kvf_little_64(number);
}

static inline uint32_t kvf_load_32(const uint8_t *source)
{
    uint32_t number;
    __builtin_memcpy(&number, source, sizeof number);
    return __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__ ? __builtin_bswap32(number) : number;
}

static inline void kvf_store_64(uint8_t *target, uint64_t number)
{
    number = kvf_little_64(number);
    __builtin_memcpy(target, &number, sizeof number);
}

#define KVF_PRIME32_1 UINT64_C(0x9E3779B1)

#endif
