/* The keys of application data of TLS 1.3 in one direction, and the records that they seal and open. RFC 8446. */

#ifndef KVF_TLS_KEYS_H
#define KVF_TLS_KEYS_H

#include <stdbool.h>
#include <sys/uio.h>

#include "openssl.h"

#define KVF_CIPHER_SUITE "TLS_AES_128_GCM_SHA256" /* the one that every TLS 1.3 has */

enum {
    KVF_TRAFFIC_SECRET = 32,
    KVF_RECORD_HEADER = 5,
    KVF_RECORD_TAG = 16,
    KVF_RECORD_MORE = KVF_RECORD_HEADER + 1 + KVF_RECORD_TAG, /* than what is sealed: a byte is its type */
    KVF_RECORD_MOST = 16 << 10,                               /* sealed in one */
};

enum { KVF_ALERT = 21, KVF_HANDSHAKE = 22, KVF_DATA = 23 }; /* types of what is sealed */

/* Of one direction. Zero: there are none yet. */
struct kvf_keys {
    EVP_CIPHER_CTX *cipher;
    uint64_t sequence; /* of the next record; with it each has a nonce of its own */
    uint8_t iv[12], secret[KVF_TRAFFIC_SECRET];
};

/* The keys of a secret. False: OpenSSL has refused, or there is no memory. */
KVF_HIDDEN bool kvf_keys_begin(struct kvf_keys *keys, const uint8_t *secret, bool seals);

/* The keys that follow these, after a KeyUpdate. */
KVF_HIDDEN bool kvf_keys_update(struct kvf_keys *keys);

KVF_HIDDEN void kvf_keys_end(struct kvf_keys *keys);

/* A place in parts of memory. */
struct kvf_place {
    const struct iovec *part;
    size_t at;
};

/* The next bytes there, at most `most`, which must exist; the place moves behind them. Returns their number. */
static inline size_t kvf_pass_bytes(struct kvf_place *place, size_t most, uint8_t **bytes)
{
    while (place->at == place->part->iov_len) {
        place->part++;
        place->at = 0;
    }
    size_t left = place->part->iov_len - place->at, size = left < most ? left : most;
    *bytes = (uint8_t *)place->part->iov_base + place->at;
    place->at += size;
    return size;
}

/* Writes a record of the next `size` bytes at `source`: size + KVF_RECORD_MORE bytes. False: OpenSSL has refused. */
KVF_HIDDEN bool kvf_seal(struct kvf_keys *keys, uint8_t *record, uint8_t type, struct kvf_place *source, size_t size);

/* The bytes that a record has after its header. */
static inline size_t kvf_sealed(const uint8_t *record)
{
    return (size_t)record[3] << 8 | record[4];
}

/* What a record had. */
struct kvf_opened {
    int64_t size; /* bytes; -1: it is not the next record of the peer, or was changed */
    uint8_t type;
    bool is_in_place; /* they begin behind its header; else they are at the target, which has moved behind them */
};

/* Opens a record: in its place, or with `target`, which has room for all of it, there and without a copy. The bytes of
 * a record that is refused are zeros there. */
KVF_HIDDEN struct kvf_opened kvf_open(struct kvf_keys *keys, uint8_t *record, struct kvf_place *target);

#endif
