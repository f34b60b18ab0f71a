/* What the drivers with random jobs share: checks, numbers of a seed, and their time. */

#ifndef KVF_DRIVER_H
#define KVF_DRIVER_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define CHECK(holds, ...)                                                \
    do {                                                                 \
        if (!(holds)) {                                                  \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #holds);  \
            fprintf(stderr, __VA_ARGS__);                                \
            fputc('\n', stderr);                                         \
            abort();                                                     \
        }                                                                \
    } while (0)

static uint64_t draw(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static uint64_t below(uint64_t *state, uint64_t end)
{
    return (draw(state) >> 11) % end;
}

static uint64_t random_length(uint64_t *state)
{
    static const uint64_t ends[] = {2, 300, 5000, 70000, 600000};
    return below(state, ends[below(state, 5)]);
}

static double ends_at;

static double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* Takes the arguments SECONDS SEED and fills the pattern. Returns the state of the numbers that follow. */
static uint64_t begin(char **arguments, uint8_t *pattern, size_t size)
{
    ends_at = seconds_now() + atof(arguments[1]);
    uint64_t state = strtoull(arguments[2], NULL, 10) * 2 + 1;
    for (int i = 0; i < 20; i++)
        draw(&state);
    for (size_t i = 0; i < size; i++)
        pattern[i] = (uint8_t)draw(&state);
    return state;
}

static bool goes_on(void)
{
    return seconds_now() < ends_at;
}

#endif
