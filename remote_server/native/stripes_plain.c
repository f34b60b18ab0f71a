/* The loops over stripes in plain C, with the streaming stores that every x86-64 processor has: a vector is a lane. */

#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define STREAM(to, vector) _mm_stream_si64((long long *)(to), (long long)(vector))
#else
#define STREAM(to, vector) (*(anywhere *)(to) = (vector))
#endif

typedef uint64_t vector;

#define SET kvf_plain
#define NAME "plain"
#define ON
#define NUMBERS(vector) kvf_little_64(vector)
#define TIMES(one, other) (((one) & UINT32_MAX) * ((other) & UINT32_MAX))
#define NEIGHBOURS(vector) (vector)
#define NEIGHBOUR 1

#include "loops.h"

void kvf_stripe(uint64_t lanes[8], const uint8_t *source, const uint8_t *secret)
{
    stripe(lanes, NULL, NULL, source, 0, secret, KVF_UNSTORED);
}
