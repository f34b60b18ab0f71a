/* Records of application data of TLS 1.3: OpenSSL's AES-128-GCM, straight between memory and the buffers of sockets. */

#define _GNU_SOURCE

#include "tls_keys.h"

#include <string.h>

enum { KEY = 16, HASH = 32 };

/* HKDF-Expand-Label without a context, of at most HASH bytes (section 7.1): one block of HKDF. */
static bool expand(const uint8_t *secret, const char *label, uint8_t *target, uint8_t size)
{
    uint8_t input[64] = {0, size}, block[HASH] = {0};
    uint8_t length = (uint8_t)strlen(label);
    input[2] = length + 6;
    memcpy(input + 3, "tls13 ", 6);
    memcpy(input + 9, label, length);
    input[9 + length + 1] = 1; /* after a context of no bytes */
    bool is_made = kvf_openssl.HMAC(kvf_openssl.EVP_sha256(), secret, KVF_TRAFFIC_SECRET, input, 9u + length + 2, block,
                                    NULL) != NULL;
    memcpy(target, block, size);
    kvf_openssl.OPENSSL_cleanse(block, sizeof block);
    return is_made;
}

/* The key and the nonces of the secret. */
static bool use_secret(struct kvf_keys *keys, int seals)
{
    uint8_t key[KEY];
    bool is_made = expand(keys->secret, "key", key, KEY) && expand(keys->secret, "iv", keys->iv, sizeof keys->iv) &&
                   kvf_openssl.EVP_CipherInit_ex(keys->cipher, seals < 0 ? NULL : kvf_openssl.EVP_aes_128_gcm(), NULL,
                                                 key, NULL, seals) == 1;
    kvf_openssl.OPENSSL_cleanse(key, sizeof key);
    keys->sequence = 0;
    return is_made;
}

bool kvf_keys_begin(struct kvf_keys *keys, const uint8_t *secret, bool seals)
{
    memcpy(keys->secret, secret, KVF_TRAFFIC_SECRET);
    keys->cipher = kvf_openssl.EVP_CIPHER_CTX_new();
    return keys->cipher && use_secret(keys, seals);
}

bool kvf_keys_update(struct kvf_keys *keys)
{
    uint8_t next[KVF_TRAFFIC_SECRET];
    bool is_made = expand(keys->secret, "traffic upd", next, sizeof next);
    memcpy(keys->secret, next, sizeof next);
    kvf_openssl.OPENSSL_cleanse(next, sizeof next);
    return is_made && use_secret(keys, -1);
}

void kvf_keys_end(struct kvf_keys *keys)
{
    if (keys->cipher) /* it wipes the key */
        kvf_openssl.EVP_CIPHER_CTX_free(keys->cipher);
    kvf_openssl.OPENSSL_cleanse(keys, sizeof *keys);
}

/* Begins a record: its nonce (section 5.3), its header as what is authenticated and not sealed. */
static bool begin(struct kvf_keys *keys, const uint8_t *header)
{
    uint8_t nonce[sizeof keys->iv];
    int size;
    memcpy(nonce, keys->iv, sizeof nonce);
    for (int i = 0; i < 8; i++)
        nonce[4 + i] ^= (uint8_t)(keys->sequence >> (56 - 8 * i));
    keys->sequence++;
    return kvf_openssl.EVP_CipherInit_ex(keys->cipher, NULL, NULL, NULL, nonce, -1) == 1 &&
           kvf_openssl.EVP_CipherUpdate(keys->cipher, NULL, &size, header, KVF_RECORD_HEADER) == 1;
}

bool kvf_seal(struct kvf_keys *keys, uint8_t *record, uint8_t type, struct kvf_place *source, size_t size)
{
    size_t sealed = size + KVF_RECORD_MORE - KVF_RECORD_HEADER;
    memcpy(record, (uint8_t[]){KVF_DATA, 3, 3, (uint8_t)(sealed >> 8), (uint8_t)sealed}, KVF_RECORD_HEADER);
    uint8_t *target = record + KVF_RECORD_HEADER, *bytes;
    int count;
    bool is_sealed = begin(keys, record);
    for (size_t passed; size && is_sealed; size -= passed, target += passed) {
        passed = kvf_pass_bytes(source, size, &bytes);
        is_sealed = kvf_openssl.EVP_CipherUpdate(keys->cipher, target, &count, bytes, (int)passed) == 1;
    }
    return is_sealed && kvf_openssl.EVP_CipherUpdate(keys->cipher, target, &count, &type, 1) == 1 &&
           kvf_openssl.EVP_CipherFinal_ex(keys->cipher, target + 1, &count) == 1 &&
           kvf_openssl.EVP_CIPHER_CTX_ctrl(keys->cipher, EVP_CTRL_AEAD_GET_TAG, KVF_RECORD_TAG, target + 1) == 1;
}

/* Deciphers `size` bytes to `target`, and the byte behind them, which without padding is the type, to `last`. */
static bool decipher(struct kvf_keys *keys, struct kvf_place *target, const uint8_t *sealed, size_t size, uint8_t *last)
{
    uint8_t *bytes;
    int count;
    for (size_t passed; size; size -= passed, sealed += passed) {
        passed = kvf_pass_bytes(target, size, &bytes);
        if (kvf_openssl.EVP_CipherUpdate(keys->cipher, bytes, &count, sealed, (int)passed) != 1)
            return false;
    }
    return kvf_openssl.EVP_CipherUpdate(keys->cipher, last, &count, sealed, 1) == 1;
}

/* Whether all that was deciphered is what the peer has sealed. */
static bool is_whole(struct kvf_keys *keys, uint8_t *tag)
{
    int count;
    return kvf_openssl.EVP_CIPHER_CTX_ctrl(keys->cipher, EVP_CTRL_AEAD_SET_TAG, KVF_RECORD_TAG, tag) == 1 &&
           kvf_openssl.EVP_CipherFinal_ex(keys->cipher, tag, &count) == 1;
}

/* Moves bytes that were deciphered at `target` to `bytes`, or nowhere without it. Zeros remain. */
static void take_back(struct kvf_place target, uint8_t *bytes, size_t size)
{
    uint8_t *from;
    for (size_t passed; size; size -= passed) {
        passed = kvf_pass_bytes(&target, size, &from);
        if (bytes)
            bytes = (uint8_t *)memcpy(bytes, from, passed) + passed;
        memset(from, 0, passed);
    }
}

struct kvf_opened kvf_open(struct kvf_keys *keys, uint8_t *record, struct kvf_place *target)
{
    struct kvf_opened refused = {-1, 0, false}, opened = {0, 0, !target};
    uint8_t *bytes = record + KVF_RECORD_HEADER;
    if (kvf_sealed(record) <= KVF_RECORD_TAG || !begin(keys, record))
        return refused;
    size_t size = kvf_sealed(record) - KVF_RECORD_TAG - 1;
    struct iovec in_place = {bytes, size};
    struct kvf_place place = target ? *target : (struct kvf_place){&in_place, 0}, end = place;
    bool is_right = decipher(keys, &end, bytes, size, &opened.type) && is_whole(keys, bytes + size + 1);
    if (is_right && opened.type == KVF_DATA) {
        if (target)
            *target = end;
        opened.size = (int64_t)size;
        return size <= KVF_RECORD_MOST ? opened : refused;
    }
    if (target)
        take_back(place, is_right ? bytes : NULL, size);
    opened.is_in_place = true;
    while (size && !opened.type) /* zeros behind the type are padding */
        opened.type = bytes[--size];
    opened.size = (int64_t)size;
    return is_right && opened.type && size <= KVF_RECORD_MOST ? opened : refused;
}
