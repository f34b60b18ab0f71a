/* XXH3-64 with a seed, from its published specification: the short forms, the state of a long block, the end of it.
 *
 * A long block is a sum over stripes of 64 bytes in eight lanes (stripes.c). Its last stripe ends with the block and
 * so overlaps the one before; the state keeps the bytes that it needs. */

#include "bytes.h"

#include <string.h>

#define PRIME32_2 UINT64_C(0x85EBCA77)
#define PRIME32_3 UINT64_C(0xC2B2AE3D)
#define PRIME64_1 UINT64_C(0x9E3779B185EBCA87)
#define PRIME64_2 UINT64_C(0xC2B2AE3D27D4EB4F)
#define PRIME64_3 UINT64_C(0x165667B19E3779F9)
#define PRIME64_4 UINT64_C(0x85EBCA77C2B2AE63)
#define PRIME64_5 UINT64_C(0x27D4EB2F165667C5)
#define MIX_1 UINT64_C(0x165667919E3779F9)
#define MIX_2 UINT64_C(0x9FB21C651E98DF25)

/* The specification's default secret. */
static const uint8_t secret[KVF_SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static uint64_t rotate(uint64_t number, int bits)
{
    return number << bits | number >> (64 - bits);
}

/* The two halves of a product of 128 bits, folded into one. */
static uint64_t fold(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t avalanche(uint64_t hash)
{
    hash ^= hash >> 37;
    hash *= MIX_1;
    return hash ^ hash >> 32;
}

/* The older avalanche, of XXH64: for the shortest blocks. */
static uint64_t avalanche_64(uint64_t hash)
{
    hash ^= hash >> 33;
    hash *= PRIME64_2;
    hash ^= hash >> 29;
    hash *= PRIME64_3;
    return hash ^ hash >> 32;
}

static uint64_t secret_64(size_t offset)
{
    return kvf_load_64(secret + offset);
}

static uint64_t of_1_to_3(const uint8_t *source, size_t size, uint64_t seed)
{
    uint64_t bytes = (uint64_t)source[0] << 16 | (uint64_t)source[size / 2] << 24 | source[size - 1] | size << 8;
    uint64_t flip = (kvf_load_32(secret) ^ kvf_load_32(secret + 4)) + seed;
    return avalanche_64(bytes ^ flip);
}

static uint64_t of_4_to_8(const uint8_t *source, size_t size, uint64_t seed)
{
    seed ^= (uint64_t)__builtin_bswap32((uint32_t)seed) << 32;
    uint64_t bytes = kvf_load_32(source + size - 4) + ((uint64_t)kvf_load_32(source) << 32);
    uint64_t hash = bytes ^ ((secret_64(8) ^ secret_64(16)) - seed);
    hash ^= rotate(hash, 49) ^ rotate(hash, 24);
    hash *= MIX_2;
    hash ^= (hash >> 35) + size;
    hash *= MIX_2;
    return hash ^ hash >> 28;
}

static uint64_t of_9_to_16(const uint8_t *source, size_t size, uint64_t seed)
{
    uint64_t low = kvf_load_64(source) ^ ((secret_64(24) ^ secret_64(32)) + seed);
    uint64_t high = kvf_load_64(source + size - 8) ^ ((secret_64(40) ^ secret_64(48)) - seed);
    return avalanche(size + __builtin_bswap64(low) + high + fold(low, high));
}

static uint64_t mix_16(const uint8_t *source, size_t offset, uint64_t seed)
{
    return fold(kvf_load_64(source) ^ (secret_64(offset) + seed),
                kvf_load_64(source + 8) ^ (secret_64(offset + 8) - seed));
}

/* Pairs of 16 bytes, from both ends towards the middle. */
static uint64_t of_17_to_128(const uint8_t *source, size_t size, uint64_t seed)
{
    uint64_t hash = size * PRIME64_1;
    for (size_t pair = 0; pair <= (size - 1) / 32; pair++) {
        hash += mix_16(source + 16 * pair, 32 * pair, seed);
        hash += mix_16(source + size - 16 * (pair + 1), 32 * pair + 16, seed);
    }
    return avalanche(hash);
}

static uint64_t of_129_to_240(const uint8_t *source, size_t size, uint64_t seed)
{
    uint64_t hash = size * PRIME64_1;
    for (size_t i = 0; i < 8; i++)
        hash += mix_16(source + 16 * i, 16 * i, seed);
    hash = avalanche(hash);
    for (size_t i = 8; i < size / 16; i++)
        hash += mix_16(source + 16 * i, 16 * (i - 8) + 3, seed);
    return avalanche(hash + mix_16(source + size - 16, 136 - 17, seed));
}

static uint64_t of_short(const uint8_t *source, size_t size, uint64_t seed)
{
    if (size > 128)
        return of_129_to_240(source, size, seed);
    if (size > 16)
        return of_17_to_128(source, size, seed);
    if (size > 8)
        return of_9_to_16(source, size, seed);
    if (size >= 4)
        return of_4_to_8(source, size, seed);
    if (size > 0)
        return of_1_to_3(source, size, seed);
    return avalanche_64(seed ^ secret_64(56) ^ secret_64(64));
}

void kvf_hash_begin(struct kvf_hash *hash, uint64_t seed, uint64_t length)
{
    hash->length = length;
    hash->taken = 0;
    hash->seed = seed;
    if (length <= KVF_SHORT_MOST)
        return;
    static const uint64_t first[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                      PRIME64_4, PRIME32_2, PRIME64_5, KVF_PRIME32_1};
    memcpy(hash->lanes, first, sizeof first);
    for (size_t i = 0; i < KVF_SECRET; i += 16) {
        kvf_store_64(hash->secret + i, secret_64(i) + seed);
        kvf_store_64(hash->secret + i + 8, secret_64(i + 8) - seed);
    }
}

uint64_t kvf_hash_end(const struct kvf_hash *hash)
{
    if (hash->length <= KVF_SHORT_MOST)
        return of_short(hash->kept, hash->length, hash->seed);
    uint64_t lanes[8];
    memcpy(lanes, hash->lanes, sizeof lanes);
    size_t after = hash->length - (hash->length - 1) / KVF_STRIPE * KVF_STRIPE; /* 1 to 64 bytes */
    kvf_stripe(lanes, hash->kept + after, hash->secret + KVF_SECRET - KVF_STRIPE - 7);
    uint64_t digest = hash->length * PRIME64_1;
    for (size_t i = 0; i < 4; i++)
        digest += fold(lanes[2 * i] ^ kvf_load_64(hash->secret + 11 + 16 * i),
                       lanes[2 * i + 1] ^ kvf_load_64(hash->secret + 19 + 16 * i));
    return avalanche(digest);
}

uint64_t kvf_xxh3(const void *source, size_t size, uint64_t seed)
{
    if (size <= KVF_SHORT_MOST)
        return of_short(source, size, seed);
    struct kvf_hash hash;
    kvf_hash_begin(&hash, seed, size);
    kvf_hash_piece(&hash, source, size);
    return kvf_hash_end(&hash);
}
