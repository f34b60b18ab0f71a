/* TLS on connections that do not block, until their handshake is complete: OpenSSL makes it in the buffers of ours. */

#define _GNU_SOURCE

#include "tls.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "tls_connection.h"

/* The buffers, as OpenSSL sees them. */

static int read_input(BIO *bio, char *target, int size)
{
    struct kvf_tls *tls = kvf_openssl.BIO_get_data(bio);
    kvf_openssl.BIO_clear_flags(bio, BIO_FLAGS_RWS | BIO_FLAGS_SHOULD_RETRY);
    int error = tls->input_begin == tls->input_end ? kvf_tls_fill(tls) : 0;
    if (error == EAGAIN)
        kvf_openssl.BIO_set_flags(bio, BIO_FLAGS_READ | BIO_FLAGS_SHOULD_RETRY);
    if (error)
        return -1;
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
        return -1; /* without a retry */
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

static uint8_t nibble(char digit)
{
    return (uint8_t)(digit <= '9' ? digit - '0' : digit - 'a' + 10);
}

/* A line about a secret of a handshake, in the format of SSLKEYLOGFILE: its name, a number, and its bytes in hex. */
static void keep_secret(const SSL *ssl, const char *line)
{
    static const char *const names[] = {"CLIENT_TRAFFIC_SECRET_0 ", "SERVER_TRAFFIC_SECRET_0 "};
    struct kvf_tls *tls = kvf_openssl.BIO_get_data(kvf_openssl.SSL_get_rbio(ssl));
    const char *digits = strrchr(line, ' ') + 1;
    for (int i = 0; i < 2; i++)
        if (!strncmp(line, names[i], strlen(names[i])) && strlen(digits) == 2 * KVF_TRAFFIC_SECRET)
            for (int at = 0; at < KVF_TRAFFIC_SECRET; at++)
                tls->secrets[i][at] = (uint8_t)(nibble(digits[2 * at]) << 4 | nibble(digits[2 * at + 1]));
}

/* Contexts. A `struct kvf_tls_context` is an SSL_CTX. */

static bool configure(SSL_CTX *context)
{
    kvf_openssl.SSL_CTX_ctrl(context, SSL_CTRL_SET_SESS_CACHE_MODE, 0, NULL);
    kvf_openssl.SSL_CTX_set_keylog_callback(context, keep_secret);
    return kvf_openssl.SSL_CTX_ctrl(context, SSL_CTRL_SET_MIN_PROTO_VERSION, TLS1_3_VERSION, NULL) == 1 &&
           kvf_openssl.SSL_CTX_set_ciphersuites(context, KVF_CIPHER_SUITE) == 1 &&
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
    memset(tls, 0, offsetof(struct kvf_tls, input));
    tls->ssl = ssl;
    tls->connection = connection;
    tls->is_server = pin == NULL;
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

/* After the handshake the records are ours. */
static int take_keys(struct kvf_tls *tls)
{
    static const uint8_t none[KVF_TRAFFIC_SECRET];
    const uint8_t *own = tls->secrets[tls->is_server], *of_peer = tls->secrets[!tls->is_server];
    if (tls->sends.cipher)
        return 0;
    bool is_made = memcmp(own, none, sizeof none) && memcmp(of_peer, none, sizeof none) &&
                   kvf_keys_begin(&tls->sends, own, true) && kvf_keys_begin(&tls->receives, of_peer, false);
    kvf_openssl.OPENSSL_cleanse(tls->secrets, sizeof tls->secrets);
    return is_made ? 0 : (tls->error = EPROTO);
}

int kvf_tls_handshake(struct kvf_tls *tls)
{
    if (tls->error)
        return -tls->error;
    kvf_openssl.ERR_clear_error();
    int result = kvf_openssl.SSL_do_handshake(tls->ssl);
    int error = result == 1 ? 0 : error_of(tls, result);
    int unsent = kvf_tls_flush(tls); /* also the alert of an error */
    if (!error && !tls->is_server && !is_pinned(tls))
        error = tls->error = EKEYREJECTED;
    if (!error)
        error = take_keys(tls);
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
    kvf_keys_end(&tls->sends);
    kvf_keys_end(&tls->receives);
    kvf_openssl.OPENSSL_cleanse(tls->secrets, sizeof tls->secrets);
    free(tls);
}
