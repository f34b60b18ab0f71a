/* The loops over stripes with AVX2: a stripe is two vectors. */

#if defined(__x86_64__)

#include <immintrin.h>
#include <stdint.h>

typedef uint64_t vector __attribute__((vector_size(32)));

#define SET kvf_avx2
#define NAME "avx2"
#define ON __attribute__((target("avx2")))
#define NUMBERS(vector) (vector)
#define TIMES(one, other) (vector) _mm256_mul_epu32((__m256i)(one), (__m256i)(other))
#define NEIGHBOURS(value) (vector) _mm256_shuffle_epi32((__m256i)(value), _MM_SHUFFLE(1, 0, 3, 2))
#define NEIGHBOUR 0
#define STREAM(to, value) _mm256_stream_si256((__m256i *)(to), (__m256i)(value))

#include "loops.h"

#endif
