/* The loops over stripes of XXH3, for each instruction set; they also store what they have loaded.
 *
 * Each lane sums a product of 32-bit halves and its neighbour's value. One stripe's loads, arithmetic and stores
 * share the registers, so a checked copy reads memory as often as a plain one. */

#include "bytes.h"

#include <string.h>

enum store { NONE, STORE, STREAM };

#define INLINE static inline __attribute__((always_inline))

#if defined(__x86_64__)
#include <immintrin.h>
#endif

void kvf_fence(void)
{
#if defined(__x86_64__)
    _mm_sfence();
#else
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

/* ---- plain C ---- */

INLINE void add_stripe(uint64_t lanes[8], const uint64_t values[8], const uint8_t *secret)
{
    for (size_t i = 0; i < 8; i++) {
        uint64_t key = values[i] ^ kvf_load_64(secret + 8 * i);
        lanes[i] += (key & UINT32_MAX) * (key >> 32);
        lanes[i ^ 1] += values[i];
    }
}

INLINE void scramble(uint64_t lanes[8], const uint8_t *secret)
{
    for (size_t i = 0; i < 8; i++) {
        lanes[i] ^= lanes[i] >> 47 ^ kvf_load_64(secret + KVF_SECRET - KVF_STRIPE + 8 * i);
        lanes[i] *= KVF_PRIME32_1;
    }
}

void kvf_stripe(uint64_t lanes[8], const uint8_t *source, const uint8_t *secret)
{
    uint64_t values[8];
    for (size_t i = 0; i < 8; i++)
        values[i] = kvf_load_64(source + 8 * i);
    add_stripe(lanes, values, secret);
}

INLINE void put_plain(uint8_t *target, const uint64_t values[8], enum store store)
{
    for (size_t i = 0; i < 8; i++) {
#if defined(__x86_64__)
        if (store == STREAM) {
            _mm_stream_si64((long long *)(target + 8 * i), (long long)values[i]);
            continue;
        }
#endif
        kvf_store_64(target + 8 * i, values[i]);
    }
}

INLINE void run_plain(struct kvf_hash *hash, uint8_t *target, const uint8_t *source, size_t stripes, enum store store)
{
    uint64_t lanes[8], values[8];
    memcpy(lanes, hash->lanes, sizeof lanes);
    for (size_t n = 0; n < stripes; n++) {
        for (size_t i = 0; i < 8; i++)
            values[i] = kvf_load_64(source + KVF_STRIPE * n + 8 * i);
        if (store)
            put_plain(target + KVF_STRIPE * n, values, store);
        add_stripe(lanes, values, hash->secret + 8 * (n % KVF_BLOCK_STRIPES));
        if (n % KVF_BLOCK_STRIPES == KVF_BLOCK_STRIPES - 1)
            scramble(lanes, hash->secret);
    }
    memcpy(hash->lanes, lanes, sizeof lanes);
    if (stripes)
        put_plain(hash->kept, values, STORE);
}

static void hash_plain(struct kvf_hash *hash, const uint8_t *source, size_t stripes)
{
    run_plain(hash, NULL, source, stripes, NONE);
}

static void hash_store_plain(struct kvf_hash *hash, uint8_t *target, const uint8_t *source, size_t stripes)
{
    run_plain(hash, target, source, stripes, STORE);
}

static void hash_stream_plain(struct kvf_hash *hash, uint8_t *target, const uint8_t *source, size_t stripes)
{
    run_plain(hash, target, source, stripes, STREAM);
}

static void stream_plain(uint8_t *target, const uint8_t *source, size_t stripes)
{
    for (size_t n = 0; n < stripes; n++) {
        uint64_t values[8];
        for (size_t i = 0; i < 8; i++)
            values[i] = kvf_load_64(source + KVF_STRIPE * n + 8 * i);
        put_plain(target + KVF_STRIPE * n, values, STREAM);
    }
}

static const struct kvf_stripes plain = {"plain", hash_plain, hash_store_plain, hash_stream_plain, stream_plain};

#if defined(__x86_64__)

/* ---- AVX2: a stripe is two registers ---- */

#define AVX2 __attribute__((target("avx2")))

AVX2 INLINE __m256i sum_avx2(__m256i lanes, __m256i value, const uint8_t *secret)
{
    __m256i key = _mm256_xor_si256(value, _mm256_loadu_si256((const __m256i *)secret));
    __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
    __m256i neighbour = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(lanes, _mm256_add_epi64(product, neighbour));
}

AVX2 INLINE __m256i scramble_avx2(__m256i lanes, const uint8_t *secret)
{
    const __m256i prime = _mm256_set1_epi64x((long long)KVF_PRIME32_1);
    lanes = _mm256_xor_si256(lanes, _mm256_srli_epi64(lanes, 47));
    lanes = _mm256_xor_si256(lanes, _mm256_loadu_si256((const __m256i *)secret));
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(lanes, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(lanes, prime), _mm256_slli_epi64(high, 32));
}

AVX2 INLINE void put_avx2(uint8_t *target, __m256i low, __m256i high, enum store store)
{
    if (store == STREAM) {
        _mm256_stream_si256((__m256i *)target, low);
        _mm256_stream_si256((__m256i *)(target + 32), high);
    } else if (store == STORE) {
        _mm256_storeu_si256((__m256i *)target, low);
        _mm256_storeu_si256((__m256i *)(target + 32), high);
    }
}

AVX2 INLINE void run_avx2(struct kvf_hash *hash, uint8_t *target, const uint8_t *source, size_t stripes,
                          enum store store)
{
    __m256i low = _mm256_loadu_si256((const __m256i *)hash->lanes);
    __m256i high = _mm256_loadu_si256((const __m256i *)(hash->lanes + 4));
    __m256i first = low, second = high;
    const uint8_t *secret = hash->secret;
    for (size_t left = stripes; left;) {
        size_t now = left < KVF_BLOCK_STRIPES ? left : KVF_BLOCK_STRIPES;
        for (size_t n = 0; n < now; n++) {
            first = _mm256_loadu_si256((const __m256i *)source);
            second = _mm256_loadu_si256((const __m256i *)(source + 32));
            put_avx2(target, first, second, store);
            low = sum_avx2(low, first, secret + 8 * n);
            high = sum_avx2(high, second, secret + 8 * n + 32);
            source += KVF_STRIPE;
            target += store ? KVF_STRIPE : 0;
        }
        if (now == KVF_BLOCK_STRIPES) {
            low = scramble_avx2(low, secret + KVF_SECRET - KVF_STRIPE);
            high = scramble_avx2(high, secret + KVF_SECRET - KVF_STRIPE + 32);
        }
        left -= now;
    }
    _mm256_storeu_si256((__m256i *)hash->lanes, low);
    _mm256_storeu_si256((__m256i *)(hash->lanes + 4), high);
    if (stripes)
        put_avx2(hash->kept, first, second, STORE);
}

AVX2 static void hash_avx2(struct kvf_hash *hash, const uint8_t *source, size_t stripes)
{
    run_avx2(hash, NULL, source, stripes, NONE);
}

AVX2 static void hash_store_avx2(struct kvf_hash *hash, uint8_t *target, const uint8_t *source, size_t stripes)
{
    run_avx2(hash, target, source, stripes, STORE);
}

AVX2 static void hash_stream_avx2(struct kvf_hash *hash, uint8_t *target, const uint8_t *source, size_t stripes)
{
    run_avx2(hash, target, source, stripes, STREAM);
}

AVX2 static void stream_avx2(uint8_t *target, const uint8_t *source, size_t stripes)
{
    for (size_t n = 0; n < stripes; n++) {
        const uint8_t *line = source + KVF_STRIPE * n;
        put_avx2(target + KVF_STRIPE * n, _mm256_loadu_si256((const __m256i *)line),
                 _mm256_loadu_si256((const __m256i *)(line + 32)), STREAM);
    }
}

static const struct kvf_stripes avx2 = {"avx2", hash_avx2, hash_store_avx2, hash_stream_avx2, stream_avx2};

/* ---- AVX-512: a stripe is one register ---- */

#define AVX512 __attribute__((target("avx512f")))

AVX512 INLINE __m512i sum_avx512(__m512i lanes, __m512i value, const uint8_t *secret)
{
    __m512i key = _mm512_xor_si512(value, _mm512_loadu_si512(secret));
    __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
    __m512i neighbour = _mm512_shuffle_epi32(value, _MM_PERM_BADC);
    return _mm512_add_epi64(lanes, _mm512_add_epi64(product, neighbour));
}

AVX512 INLINE __m512i scramble_avx512(__m512i lanes, const uint8_t *secret)
{
    const __m512i prime = _mm512_set1_epi64((long long)KVF_PRIME32_1);
    lanes = _mm512_xor_si512(lanes, _mm512_srli_epi64(lanes, 47));
    lanes = _mm512_xor_si512(lanes, _mm512_loadu_si512(secret));
    __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(lanes, 32), prime);
    return _mm512_add_epi64(_mm512_mul_epu32(lanes, prime), _mm512_slli_epi64(high, 32));
}

AVX512 INLINE void put_avx512(uint8_t *target, __m512i value, enum store store)
{
    if (store == STREAM)
        _mm512_stream_si512((__m512i *)target, value);
    else if (store == STORE)
        _mm512_storeu_si512(target, value);
}

AVX512 INLINE void run_avx512(struct kvf_hash *hash, uint8_t *target, const uint8_t *source, size_t stripes,
                              enum store store)
{
    __m512i lanes = _mm512_loadu_si512(hash->lanes), value = lanes;
    const uint8_t *secret = hash->secret;
    for (size_t left = stripes; left;) {
        size_t now = left < KVF_BLOCK_STRIPES ? left : KVF_BLOCK_STRIPES;
        for (size_t n = 0; n < now; n++) {
            value = _mm512_loadu_si512(source);
            put_avx512(target, value, store);
            lanes = sum_avx512(lanes, value, secret + 8 * n);
            source += KVF_STRIPE;
            target += store ? KVF_STRIPE : 0;
        }
        if (now == KVF_BLOCK_STRIPES)
            lanes = scramble_avx512(lanes, secret + KVF_SECRET - KVF_STRIPE);
        left -= now;
    }
    _mm512_storeu_si512(hash->lanes, lanes);
    if (stripes)
        _mm512_storeu_si512(hash->kept, value);
}

AVX512 static void hash_avx512(struct kvf_hash *hash, const uint8_t *source, size_t stripes)
{
    run_avx512(hash, NULL, source, stripes, NONE);
}

AVX512 static void hash_store_avx512(struct kvf_hash *hash, uint8_t *target, const uint8_t *source, size_t stripes)
{
    run_avx512(hash, target, source, stripes, STORE);
}

AVX512 static void hash_stream_avx512(struct kvf_hash *hash, uint8_t *target, const uint8_t *source, size_t stripes)
{
    run_avx512(hash, target, source, stripes, STREAM);
}

AVX512 static void stream_avx512(uint8_t *target, const uint8_t *source, size_t stripes)
{
    for (size_t n = 0; n < stripes; n++)
        put_avx512(target + KVF_STRIPE * n, _mm512_loadu_si512(source + KVF_STRIPE * n), STREAM);
}

static const struct kvf_stripes avx512 = {"avx512", hash_avx512, hash_store_avx512, hash_stream_avx512, stream_avx512};

#endif

/* The processor's, best first, up to NULL. */
static void present(const struct kvf_stripes *sets[4])
{
#if defined(__x86_64__)
    __builtin_cpu_init(); /* may run before the compiler's own constructors */
    if (__builtin_cpu_supports("avx512f"))
        *sets++ = &avx512;
    if (__builtin_cpu_supports("avx2"))
        *sets++ = &avx2;
#endif
    *sets++ = &plain;
    *sets = NULL;
}

const struct kvf_stripes *kvf_stripes_best(void)
{
    const struct kvf_stripes *sets[4];
    present(sets);
    return sets[0];
}

const struct kvf_stripes *kvf_stripes_named(const char *name)
{
    const struct kvf_stripes *sets[4];
    present(sets);
    for (size_t i = 0; sets[i]; i++)
        if (strcmp(sets[i]->name, name) == 0)
            return sets[i];
    return NULL;
}
