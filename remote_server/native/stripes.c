/* The loops over stripes of XXH3, for each instruction set; they also store what they have loaded.
 *
 * Each lane sums a product of 32-bit halves and its neighbour's value. One stripe's load, arithmetic and store share
 * the registers, so a checked copy reads memory as often as a plain one. */

#include "bytes.h"

#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

enum store { NONE, STORE, STREAM };

#define INLINE static inline __attribute__((always_inline))
enum { PAGE_STRIPES = 4096 / KVF_STRIPE };

/* Before each page of a target, loads a line of the page after the next, and with it the address translation. Without
 * it the first streaming store there waits: 560 KiB to 4 MiB blocks took 0.69 to 0.63 of a memcpy, with it 0.63 to 0.57
 * (pages of 2 MiB: 0.80 to 0.67, 0.64 to 0.54). Loading the source ahead as well gained 0.02, and lost 0.1 there. */
INLINE void before(const uint8_t *target, size_t at, size_t stripes, enum store store)
{
    if (store && at % PAGE_STRIPES == 0 && stripes - at > 2 * PAGE_STRIPES)
        __builtin_prefetch(target + (at + 2 * PAGE_STRIPES) * KVF_STRIPE);
}

/* The three functions of a set that hash, and the set. */
#define SET(set, instructions)                                                                                        \
    instructions static void hash_##set(struct kvf_hash *hash, const uint8_t *source, size_t stripes)                 \
    {                                                                                                                 \
        run_##set(hash, NULL, source, stripes, NONE);                                                                 \
    }                                                                                                                 \
    instructions static void hash_store_##set(struct kvf_hash *hash, uint8_t *target, const uint8_t *source,          \
                                              size_t stripes)                                                         \
    {                                                                                                                 \
        run_##set(hash, target, source, stripes, STORE);                                                              \
    }                                                                                                                 \
    instructions static void hash_stream_##set(struct kvf_hash *hash, uint8_t *target, const uint8_t *source,         \
                                               size_t stripes)                                                        \
    {                                                                                                                 \
        run_##set(hash, target, source, stripes, STREAM);                                                             \
    }                                                                                                                 \
    static const struct kvf_stripes set = {#set, hash_##set, hash_store_##set, hash_stream_##set, stream_##set};

/* ---- plain C, with the streaming stores that every x86-64 processor has ---- */

INLINE uint64_t take(const uint8_t *source)
{
    uint64_t value = kvf_load_64(source);
    __asm__("" : "+r"(value)); /* the compiler can no longer read the source a second time, nor use narrow vectors */
    return value;
}

INLINE void put(uint8_t *target, uint64_t value, enum store store)
{
#if defined(__x86_64__)
    if (store == STREAM) {
        _mm_stream_si64((long long *)target, (long long)value);
        return;
    }
#endif
    (void)store;
    kvf_store_64(target, value);
}

INLINE void sum(uint64_t *lanes, uint64_t value, uint64_t neighbour, const uint8_t *secret)
{
    uint64_t key = value ^ kvf_load_64(secret);
    *lanes += neighbour + (key & UINT32_MAX) * (key >> 32);
}

/* One stripe, two lanes at a time. `kept` is NULL or takes its bytes too. */
INLINE void stripe(uint64_t lanes[8], uint8_t *target, uint8_t *kept, const uint8_t *source, const uint8_t *secret,
                   enum store store)
{
    for (size_t i = 0; i < 8; i += 2) {
        uint64_t even = take(source + 8 * i), odd = take(source + 8 * i + 8);
        if (store) {
            put(target + 8 * i, even, store);
            put(target + 8 * i + 8, odd, store);
        }
        if (kept) {
            put(kept + 8 * i, even, STORE);
            put(kept + 8 * i + 8, odd, STORE);
        }
        sum(&lanes[i], even, odd, secret + 8 * i);
        sum(&lanes[i + 1], odd, even, secret + 8 * i + 8);
    }
}

void kvf_stripe(uint64_t lanes[8], const uint8_t *source, const uint8_t *secret)
{
    stripe(lanes, NULL, NULL, source, secret, NONE);
}

INLINE void run_plain(struct kvf_hash *hash, uint8_t *target, const uint8_t *source, size_t stripes, enum store store)
{
    uint64_t lanes[8];
    memcpy(lanes, hash->lanes, sizeof lanes);
    for (size_t at = 0; at < stripes; at += KVF_BLOCK_STRIPES) {
        before(target, at, stripes, store);
        size_t count = stripes - at < KVF_BLOCK_STRIPES ? stripes - at : KVF_BLOCK_STRIPES;
        for (size_t n = 0; n < count; n++)
            stripe(lanes, store ? target + (at + n) * KVF_STRIPE : NULL, at + n + 1 == stripes ? hash->kept : NULL,
                   source + (at + n) * KVF_STRIPE, hash->secret + 8 * n, store);
        for (size_t i = 0; i < 8 && count == KVF_BLOCK_STRIPES; i++) {
            lanes[i] ^= lanes[i] >> 47 ^ kvf_load_64(hash->secret + KVF_SECRET - KVF_STRIPE + 8 * i);
            lanes[i] *= KVF_PRIME32_1;
        }
    }
    memcpy(hash->lanes, lanes, sizeof lanes);
}

static void stream_plain(uint8_t *target, const uint8_t *source, size_t stripes)
{
    for (size_t n = 0; n < stripes; n++) {
        before(target, n, stripes, STREAM);
        for (size_t i = 0; i < KVF_STRIPE; i += 8)
            put(target + n * KVF_STRIPE + i, take(source + n * KVF_STRIPE + i), STREAM);
    }
}

SET(plain, )

#if defined(__x86_64__)

/* ---- AVX2: a stripe is two registers ---- */

#define AVX2 __attribute__((target("avx2")))

AVX2 INLINE __m256i load_256(const void *source)
{
    return _mm256_loadu_si256((const __m256i *)source);
}

AVX2 INLINE void put_256(void *target, __m256i value, enum store store)
{
    if (store == STREAM)
        _mm256_stream_si256((__m256i *)target, value);
    else
        _mm256_storeu_si256((__m256i *)target, value);
}

AVX2 INLINE __m256i sum_256(__m256i lanes, __m256i value, const uint8_t *secret)
{
    __m256i key = _mm256_xor_si256(value, load_256(secret));
    __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
    __m256i neighbour = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(lanes, _mm256_add_epi64(product, neighbour));
}

AVX2 INLINE __m256i scramble_256(__m256i lanes, const uint8_t *secret)
{
    const __m256i prime = _mm256_set1_epi64x((long long)KVF_PRIME32_1);
    lanes = _mm256_xor_si256(lanes, _mm256_srli_epi64(lanes, 47));
    lanes = _mm256_xor_si256(lanes, load_256(secret));
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(lanes, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(lanes, prime), _mm256_slli_epi64(high, 32));
}

AVX2 INLINE void run_avx2(struct kvf_hash *hash, uint8_t *target, const uint8_t *source, size_t stripes,
                          enum store store)
{
    __m256i low = load_256(hash->lanes), high = load_256(hash->lanes + 4);
    __m256i first = low, second = high;
    for (size_t at = 0; at < stripes; at += KVF_BLOCK_STRIPES) {
        before(target, at, stripes, store);
        size_t count = stripes - at < KVF_BLOCK_STRIPES ? stripes - at : KVF_BLOCK_STRIPES;
        for (size_t n = 0; n < count; n++) {
            const uint8_t *from = source + (at + n) * KVF_STRIPE;
            first = load_256(from);
            second = load_256(from + 32);
            if (store) {
                put_256(target + (at + n) * KVF_STRIPE, first, store);
                put_256(target + (at + n) * KVF_STRIPE + 32, second, store);
            }
            low = sum_256(low, first, hash->secret + 8 * n);
            high = sum_256(high, second, hash->secret + 8 * n + 32);
        }
        if (count == KVF_BLOCK_STRIPES) {
            low = scramble_256(low, hash->secret + KVF_SECRET - KVF_STRIPE);
            high = scramble_256(high, hash->secret + KVF_SECRET - KVF_STRIPE + 32);
        }
    }
    put_256(hash->lanes, low, STORE);
    put_256(hash->lanes + 4, high, STORE);
    if (stripes) {
        put_256(hash->kept, first, STORE);
        put_256(hash->kept + 32, second, STORE);
    }
}

AVX2 static void stream_avx2(uint8_t *target, const uint8_t *source, size_t stripes)
{
    for (size_t n = 0; n < stripes; n++) {
        before(target, n, stripes, STREAM);
        put_256(target + n * KVF_STRIPE, load_256(source + n * KVF_STRIPE), STREAM);
        put_256(target + n * KVF_STRIPE + 32, load_256(source + n * KVF_STRIPE + 32), STREAM);
    }
}

SET(avx2, AVX2)

/* ---- AVX-512: a stripe is one register ---- */

#define AVX512 __attribute__((target("avx512f")))

AVX512 INLINE void put_512(void *target, __m512i value, enum store store)
{
    if (store == STREAM)
        _mm512_stream_si512((__m512i *)target, value);
    else
        _mm512_storeu_si512(target, value);
}

AVX512 INLINE __m512i sum_512(__m512i lanes, __m512i value, const uint8_t *secret)
{
    __m512i key = _mm512_xor_si512(value, _mm512_loadu_si512(secret));
    __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
    __m512i neighbour = _mm512_shuffle_epi32(value, _MM_PERM_BADC);
    return _mm512_add_epi64(lanes, _mm512_add_epi64(product, neighbour));
}

AVX512 INLINE __m512i scramble_512(__m512i lanes, const uint8_t *secret)
{
    const __m512i prime = _mm512_set1_epi64((long long)KVF_PRIME32_1);
    lanes = _mm512_xor_si512(lanes, _mm512_srli_epi64(lanes, 47));
    lanes = _mm512_xor_si512(lanes, _mm512_loadu_si512(secret));
    __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(lanes, 32), prime);
    return _mm512_add_epi64(_mm512_mul_epu32(lanes, prime), _mm512_slli_epi64(high, 32));
}

AVX512 INLINE void run_avx512(struct kvf_hash *hash, uint8_t *target, const uint8_t *source, size_t stripes,
                              enum store store)
{
    __m512i lanes = _mm512_loadu_si512(hash->lanes), value = lanes;
    for (size_t at = 0; at < stripes; at += KVF_BLOCK_STRIPES) {
        before(target, at, stripes, store);
        size_t count = stripes - at < KVF_BLOCK_STRIPES ? stripes - at : KVF_BLOCK_STRIPES;
        for (size_t n = 0; n < count; n++) {
            value = _mm512_loadu_si512(source + (at + n) * KVF_STRIPE);
            if (store)
                put_512(target + (at + n) * KVF_STRIPE, value, store);
            lanes = sum_512(lanes, value, hash->secret + 8 * n);
        }
        if (count == KVF_BLOCK_STRIPES)
            lanes = scramble_512(lanes, hash->secret + KVF_SECRET - KVF_STRIPE);
    }
    put_512(hash->lanes, lanes, STORE);
    if (stripes)
        put_512(hash->kept, value, STORE);
}

AVX512 static void stream_avx512(uint8_t *target, const uint8_t *source, size_t stripes)
{
    for (size_t n = 0; n < stripes; n++) {
        before(target, n, stripes, STREAM);
        put_512(target + n * KVF_STRIPE, _mm512_loadu_si512(source + n * KVF_STRIPE), STREAM);
    }
}

SET(avx512, AVX512)

/* True if the processor has a feature (a bit of EBX of CPUID leaf 7) and the kernel saves its registers (XCR0).
 * __builtin_cpu_supports denies every feature, or does not link, where zig supplies the compiler's library. */
static bool has(uint32_t feature, uint32_t registers)
{
    uint32_t a, b, c, d, saved, saved_high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE))
        return false;
    __asm__("xgetbv" : "=a"(saved), "=d"(saved_high) : "c"(0));
    return (saved & registers) == registers && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & feature);
}

#endif

const struct kvf_stripes *kvf_stripes_named(const char *name)
{
#if defined(__x86_64__)
    if ((!name || strcmp(name, "avx512") == 0) && has(bit_AVX512F, 0xe6)) /* vectors of 128, 256, 512 bits, masks */
        return &avx512;
    if ((!name || strcmp(name, "avx2") == 0) && has(bit_AVX2, 0x06)) /* vectors of 128, 256 bits */
        return &avx2;
#endif
    return !name || strcmp(name, "plain") == 0 ? &plain : NULL;
}

void kvf_fence(void)
{
#if defined(__x86_64__)
    _mm_sfence();
#endif
}
