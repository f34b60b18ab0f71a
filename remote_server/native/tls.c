/* TLS on connections that do not block: contexts, handshakes, and the few bytes before a lane. */

#define _GNU_SOURCE

#include "tls.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tls_connection.h"

#define CIPHER_SUITE "TLS_AES_128_GCM_SHA256" /* the one that every TLS 1.3 has */

/* Contexts. A `struct kvf_tls_context` is an SSL_CTX. */

static bool configure(SSL_CTX *context)
{
    kvf_openssl.SSL_CTX_ctrl(context, SSL_CTRL_SET_SESS_CACHE_MODE, 0, NULL);
    /* SSL_read returns after each message that is no block, and a receive counts them. */
    kvf_openssl.SSL_CTX_ctrl(context, SSL_CTRL_CLEAR_MODE, SSL_MODE_AUTO_RETRY, NULL);
    return kvf_openssl.SSL_CTX_ctrl(context, SSL_CTRL_SET_MIN_PROTO_VERSION, TLS1_3_VERSION, NULL) == 1 &&
           kvf_openssl.SSL_CTX_set_ciphersuites(context, CIPHER_SUITE) == 1 &&
           kvf_openssl.SSL_CTX_set_num_tickets(context, 0) == 1;
}

static bool use_pair(SSL_CTX *context, const uint8_t *certificate, uint64_t certificate_size, const uint8_t *key,
                     uint64_t key_size)
{
    EVP_PKEY *private = kvf_openssl.d2i_AutoPrivateKey(NULL, &key, (long)key_size);
    bool is_pair = private &&
                   kvf_openssl.SSL_CTX_use_certificate_ASN1(context, (int)certificate_size, certificate) == 1 &&
                   kvf_openssl.SSL_CTX_use_PrivateKey(context, private) == 1 &&
                   kvf_openssl.SSL_CTX_check_private_key(context) == 1;
    kvf_openssl.EVP_PKEY_free(private);
    return is_pair;
}

struct kvf_tls_context *kvf_tls_context_new(const uint8_t *certificate, uint64_t certificate_size, const uint8_t *key,
                                            uint64_t key_size)
{
    if (kvf_tls_why_none() || !kvf_tls_make_buffers())
        return NULL;
    SSL_CTX *context = kvf_openssl.SSL_CTX_new(certificate ? kvf_openssl.TLS_server_method()
                                                           : kvf_openssl.TLS_client_method());
    if (!context || !configure(context) ||
        (certificate && !use_pair(context, certificate, certificate_size, key, key_size))) {
        kvf_openssl.SSL_CTX_free(context);
        context = NULL;
    }
    kvf_openssl.ERR_clear_error();
    return (struct kvf_tls_context *)context;
}

void kvf_tls_context_free(struct kvf_tls_context *context)
{
    kvf_openssl.SSL_CTX_free((SSL_CTX *)context);
}

/* Connections. */

struct kvf_tls *kvf_tls_new(struct kvf_tls_context *context, int connection, const uint8_t *pin)
{
    struct kvf_tls *tls = malloc(sizeof *tls); /* most of it is not touched before blocks pass */
    BIO *bio = kvf_tls_buffers(tls);
    SSL *ssl = kvf_openssl.SSL_new((SSL_CTX *)context);
    if (!tls || !bio || !ssl) {
        free(tls);
        kvf_openssl.BIO_free(bio);
        kvf_openssl.SSL_free(ssl);
        return NULL;
    }
    memset(tls, 0, offsetof(struct kvf_tls, input));
    tls->ssl = ssl;
    tls->connection = connection;
    tls->is_server = pin == NULL;
    if (pin)
        memcpy(tls->pin, pin, KVF_PIN);
    kvf_openssl.SSL_set_bio(ssl, bio, bio);
    if (pin)
        kvf_openssl.SSL_set_connect_state(ssl);
    else
        kvf_openssl.SSL_set_accept_state(ssl);
    return tls;
}

static bool is_pinned(struct kvf_tls *tls)
{
    uint8_t digest[64];
    unsigned size = 0;
    X509 *certificate = kvf_openssl.SSL_get1_peer_certificate(tls->ssl);
    bool is_it = certificate && kvf_openssl.X509_digest(certificate, kvf_openssl.EVP_sha256(), digest, &size) == 1 &&
                 size == KVF_PIN && !memcmp(digest, tls->pin, KVF_PIN);
    kvf_openssl.X509_free(certificate);
    return is_it;
}

int kvf_tls_handshake(struct kvf_tls *tls)
{
    if (tls->error)
        return -tls->error;
    tls->inputs = 0;
    kvf_openssl.ERR_clear_error();
    int result = kvf_openssl.SSL_do_handshake(tls->ssl);
    int error = result == 1 ? 0 : kvf_tls_error(tls, result);
    int unsent = kvf_tls_flush(tls); /* also the alert of an error */
    if (!error && !tls->is_server && !is_pinned(tls))
        error = tls->error = EKEYREJECTED;
    kvf_openssl.ERR_clear_error();
    return -(error ? error : unsent);
}

int64_t kvf_tls_read(struct kvf_tls *tls, uint8_t *memory, uint64_t size)
{
    struct iovec part = {memory, size};
    ssize_t count = kvf_tls_receive(tls, &(struct msghdr){.msg_iov = &part, .msg_iovlen = 1});
    return count < 0 ? -errno : count;
}

int64_t kvf_tls_write(struct kvf_tls *tls, const uint8_t *memory, uint64_t size)
{
    struct iovec part = {(void *)(uintptr_t)memory, size < KVF_TLS_MOST ? size : KVF_TLS_MOST};
    ssize_t count = kvf_tls_send(tls, &(struct msghdr){.msg_iov = &part, .msg_iovlen = 1});
    return count < 0 ? -errno : count;
}

void kvf_tls_free(struct kvf_tls *tls)
{
    if (!tls)
        return;
    kvf_openssl.SSL_free(tls->ssl);
    free(tls);
}
