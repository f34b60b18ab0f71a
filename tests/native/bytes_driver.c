/* Hashes and copies of native/bytes.h in buffers of exactly their size: a program to run under sanitizers.
 *
 *     gcc -std=c11 -g -O2 -fsanitize=address,undefined -fno-sanitize-recover=all -Iremote_server/native \
 *         tests/native/bytes_driver.c remote_server/native/{xxh3,copy,stripes*}.c -o bytes_driver && ./bytes_driver
 *
 * Every instruction set must give the digests of plain C, in one piece, whatever the alignment and the cuts;
 * tests/remote_server/native/test_native_bytes.py compares those with another implementation. Exits with 1 at a difference. */

#define _POSIX_C_SOURCE 200112L

#include "bytes.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t state = 1;

static uint64_t chance(uint64_t below)
{
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (state >> 33) % below;
}

/* `size` bytes that end where the allocation ends, `offset` bytes behind a multiple of 64. */
static uint8_t *exactly(void **allocation, size_t offset, size_t size)
{
    if (posix_memalign(allocation, KVF_STRIPE, offset + size))
        abort();
    return (uint8_t *)*allocation + offset;
}

static void expect(int is_true, const char *what, size_t size)
{
    if (!is_true) {
        printf("%s: %s of %zu bytes differs\n", kvf_instructions(), what, size);
        exit(1);
    }
}

static void check(const char *const *names, size_t size)
{
    void *allocations[2];
    uint64_t seed = chance(3) ? state : 0;
    uint8_t *source = exactly(&allocations[0], chance(KVF_STRIPE), size);
    uint8_t *target = exactly(&allocations[1], chance(2) ? chance(KVF_STRIPE) : 0, size);
    for (size_t i = 0; i < size; i++)
        source[i] = (uint8_t)chance(256);
    kvf_use_instructions("plain");
    uint64_t digest = kvf_xxh3(source, size, seed);
    for (; *names; names++) {
        if (kvf_use_instructions(*names))
            continue;
        expect(kvf_xxh3(source, size, seed) == digest, "hash", size);
        for (int hashes = 0; hashes < 2; hashes++) {
            bool streams = chance(2);
            struct kvf_hash hash;
            kvf_hash_begin(&hash, seed, size);
            memset(target, 0, size);
            size_t at = 0;
            do {
                size_t piece = size - at;
                if (piece > 4096 && chance(3))
                    piece = (1 + chance(piece / 4096)) * 4096;
                kvf_copy_piece(hashes ? &hash : NULL, target + at, source + at, piece, streams);
                at += piece;
            } while (at < size);
            expect(memcmp(target, source, size) == 0, "copy", size);
            expect(!hashes || kvf_hash_end(&hash) == digest, "hash of a copy", size);
        }
    }
    free(allocations[0]);
    free(allocations[1]);
}

int main(void)
{
    static const char *const names[] = {"plain", "avx2", "avx512", NULL};
    printf("%s\n", kvf_instructions());
    for (size_t size = 0; size < 9000; size++)
        check(names, size);
    for (int i = 0; i < 3000; i++)
        check(names, chance(70000));
    check(names, (1 << 20) + 1);
    kvf_copy_piece(NULL, NULL, NULL, 0, true);
    printf("ok\n");
    return 0;
}
