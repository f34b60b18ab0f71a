/* TLS on connections that do not block: records are formed and opened in buffers, which the socket fills and empties. */

#define _GNU_SOURCE

#include "tls.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#include "openssl.h"
#include "tls_records.h"

enum {
    RECORD = 16 << 10,      /* the most that one has */
    INPUT_BYTES = 128 << 10, /* of one system call */
    /* A send of KVF_TLS_MOST with 22 bytes a record, and a reply to a key update before it. */
    OUTPUT_BYTES = KVF_TLS_MOST + (4 << 10),
};

struct kvf_tls {
    SSL *ssl;
    int connection;
    bool has_pin, is_closed; /* is_closed: the peer has closed the connection */
    int error;               /* an errno; nothing follows it */
    uint32_t input_begin, input_end, output_begin, output_end, accepted; /* accepted: bytes sent, not reported yet */
    uint8_t pin[KVF_PIN];
    uint8_t staged[RECORD]; /* small parts, gathered for a record */
    uint8_t input[INPUT_BYTES], output[OUTPUT_BYTES]; /* records */
};

/* The buffers, as OpenSSL sees them. */

static int read_input(BIO *bio, char *target, int size)
{
    struct kvf_tls *tls = kvf_openssl.BIO_get_data(bio);
    kvf_openssl.BIO_clear_flags(bio, BIO_FLAGS_RWS | BIO_FLAGS_SHOULD_RETRY);
    if (tls->input_begin == tls->input_end) {
        ssize_t count;
        do
            count = recv(tls->connection, tls->input, INPUT_BYTES, MSG_DONTWAIT);
        while (count < 0 && errno == EINTR);
        if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            kvf_openssl.BIO_set_flags(bio, BIO_FLAGS_READ | BIO_FLAGS_SHOULD_RETRY);
        else if (count < 0)
            tls->error = errno;
        else if (count == 0)
            tls->is_closed = true;
        if (count <= 0)
            return -1;
        tls->input_begin = 0;
        tls->input_end = (uint32_t)count;
    }
    uint32_t left = tls->input_end - tls->input_begin;
    if ((uint32_t)size > left)
        size = (int)left;
    memcpy(target, tls->input + tls->input_begin, (size_t)size);
    tls->input_begin += (uint32_t)size;
    return size;
}

static int write_output(BIO *bio, const char *source, int size)
{
    struct kvf_tls *tls = kvf_openssl.BIO_get_data(bio);
    if ((uint32_t)size > OUTPUT_BYTES - tls->output_end)
        return -1; /* without a retry: the peer has us reply, and reads no replies */
    memcpy(tls->output + tls->output_end, source, (size_t)size);
    tls->output_end += (uint32_t)size;
    return size;
}

static long control(BIO *bio, int command, long number, void *pointer)
{
    (void)bio, (void)number, (void)pointer;
    return command == BIO_CTRL_FLUSH;
}

static BIO_METHOD *buffers;

static void make_buffers(void)
{
    buffers = kvf_openssl.BIO_meth_new(kvf_openssl.BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "kvferry");
    if (!buffers)
        return;
    kvf_openssl.BIO_meth_set_read(buffers, read_input);
    kvf_openssl.BIO_meth_set_write(buffers, write_output);
    kvf_openssl.BIO_meth_set_ctrl(buffers, control);
}

/* Contexts. A `struct kvf_tls_context` is an SSL_CTX. */

static bool configure(SSL_CTX *context)
{
    kvf_openssl.SSL_CTX_ctrl(context, SSL_CTRL_SET_SESS_CACHE_MODE, 0, NULL);
    return kvf_openssl.SSL_CTX_ctrl(context, SSL_CTRL_SET_MIN_PROTO_VERSION, TLS1_3_VERSION, NULL) == 1 &&
           kvf_openssl.SSL_CTX_set_ciphersuites(
               context, "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256:TLS_AES_256_GCM_SHA384") == 1 &&
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
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (kvf_tls_why_none())
        return NULL;
    pthread_once(&once, make_buffers);
    SSL_CTX *context = kvf_openssl.SSL_CTX_new(certificate ? kvf_openssl.TLS_server_method()
                                                           : kvf_openssl.TLS_client_method());
    if (!buffers || !context || !configure(context) ||
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
    BIO *bio = kvf_openssl.BIO_new(buffers);
    SSL *ssl = kvf_openssl.SSL_new((SSL_CTX *)context);
    if (!tls || !bio || !ssl) {
        free(tls);
        kvf_openssl.BIO_free(bio);
        kvf_openssl.SSL_free(ssl);
        return NULL;
    }
    tls->ssl = ssl;
    tls->connection = connection;
    tls->is_closed = false;
    tls->error = 0;
    tls->input_begin = tls->input_end = tls->output_begin = tls->output_end = tls->accepted = 0;
    tls->has_pin = pin != NULL;
    if (pin)
        memcpy(tls->pin, pin, KVF_PIN);
    kvf_openssl.BIO_set_data(bio, tls);
    kvf_openssl.BIO_set_init(bio, 1);
    kvf_openssl.SSL_set_bio(ssl, bio, bio);
    if (pin)
        kvf_openssl.SSL_set_connect_state(ssl);
    else
        kvf_openssl.SSL_set_accept_state(ssl);
    return tls;
}

/* The errno of a call of OpenSSL that returned `result`. ECONNRESET, EPROTO and those of the system stay. */
static int error_of(struct kvf_tls *tls, int result)
{
    if (tls->error)
        return tls->error;
    int error = kvf_openssl.SSL_get_error(tls->ssl, result);
    if (error == SSL_ERROR_WANT_READ && !tls->is_closed)
        return EAGAIN;
    if (error == SSL_ERROR_ZERO_RETURN)
        tls->is_closed = true;
    if (!tls->is_closed)
        tls->error = EPROTO;
    return tls->is_closed ? ECONNRESET : EPROTO;
}

/* Sends the records that are formed: 0 or an errno. */
static int flush(struct kvf_tls *tls)
{
    while (tls->output_begin < tls->output_end) {
        ssize_t count = send(tls->connection, tls->output + tls->output_begin, tls->output_end - tls->output_begin,
                             MSG_DONTWAIT | MSG_NOSIGNAL);
        if (count < 0 && errno == EINTR)
            continue;
        if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return EAGAIN;
        if (count < 0)
            return tls->error = errno;
        tls->output_begin += (uint32_t)count;
    }
    tls->output_begin = tls->output_end = 0;
    return 0;
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
    kvf_openssl.ERR_clear_error();
    int result = kvf_openssl.SSL_do_handshake(tls->ssl);
    int error = result == 1 ? 0 : error_of(tls, result);
    int unsent = flush(tls); /* also the alert of an error */
    if (!error && tls->has_pin && !is_pinned(tls))
        error = tls->error = EKEYREJECTED;
    kvf_openssl.ERR_clear_error();
    return -(error ? error : unsent);
}

bool kvf_tls_has_input(const struct kvf_tls *tls)
{
    return tls->input_begin < tls->input_end || tls->error || kvf_openssl.SSL_pending(tls->ssl) > 0;
}

ssize_t kvf_tls_receive(struct kvf_tls *tls, const struct msghdr *message)
{
    size_t all = 0;
    int error = tls->error;
    for (size_t i = 0; i < message->msg_iovlen && !error; i++) {
        const struct iovec *part = &message->msg_iov[i];
        for (size_t at = 0; at < part->iov_len && !error;) {
            size_t size = part->iov_len - at < RECORD ? part->iov_len - at : RECORD;
            int count = kvf_openssl.SSL_read(tls->ssl, (uint8_t *)part->iov_base + at, (int)size);
            if (count > 0) {
                at += (size_t)count;
                all += (size_t)count;
            } else {
                error = error_of(tls, count);
                kvf_openssl.ERR_clear_error();
            }
        }
    }
    if (!tls->accepted)
        flush(tls); /* a reply to a key update; what is left goes before the next blocks */
    if (all)
        return (ssize_t)all;
    if (tls->is_closed)
        return 0;
    errno = error;
    return -1;
}

static bool write_record(struct kvf_tls *tls, const uint8_t *source, size_t size)
{
    int count = kvf_openssl.SSL_write(tls->ssl, source, (int)size);
    if (count == (int)size)
        return true;
    kvf_openssl.ERR_clear_error();
    tls->error = EPROTO;
    return false;
}

/* Forms records of all parts. */
static bool encrypt(struct kvf_tls *tls, const struct msghdr *message)
{
    size_t staged = 0;
    for (size_t i = 0; i < message->msg_iovlen; i++) {
        const struct iovec *part = &message->msg_iov[i];
        for (size_t at = 0, size; at < part->iov_len; at += size) {
            const uint8_t *source = (const uint8_t *)part->iov_base + at;
            size = part->iov_len - at;
            if (!staged && size >= RECORD) {
                size = RECORD;
                if (!write_record(tls, source, size))
                    return false;
                continue;
            }
            if (size > RECORD - staged)
                size = RECORD - staged;
            memcpy(tls->staged + staged, source, size);
            staged += size;
            if (staged == RECORD) {
                if (!write_record(tls, tls->staged, staged))
                    return false;
                staged = 0;
            }
        }
        tls->accepted += (uint32_t)part->iov_len;
    }
    return !staged || write_record(tls, tls->staged, staged);
}

ssize_t kvf_tls_send(struct kvf_tls *tls, const struct msghdr *message)
{
    int error = tls->error;
    if (!error && !tls->accepted)
        error = flush(tls);
    if (!error && !tls->accepted && !encrypt(tls, message))
        error = tls->error;
    if (!error)
        error = flush(tls);
    if (error) {
        errno = error;
        return -1;
    }
    ssize_t all = tls->accepted;
    tls->accepted = 0;
    return all;
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
