/* The loops over stripes with AVX-512: a stripe is one vector. */

#if defined(__x86_64__)

#include <immintrin.h>
#include <stdint.h>

typedef uint64_t vector __attribute__((vector_size(64)));

#define SET kvf_avx512
#define NAME "avx512"
#define ON __attribute__((target("avx512f")))
#define NUMBERS(vector) (vector)
#define TIMES(one, other) (vector) _mm512_mul_epu32((__m512i)(one), (__m512i)(other))
#define NEIGHBOURS(value) (vector) _mm512_shuffle_epi32((__m512i)(value), _MM_PERM_BADC)
#define NEIGHBOUR 0
#define STREAM(to, value) _mm512_stream_si512((__m512i *)(to), (__m512i)(value))

#include "loops.h"

#endif
