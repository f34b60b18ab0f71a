/* Blocks through TLS, after the handshake. OpenSSL forms and opens the records, in buffers of ours between it and the
 * connection, so that the system calls are as large as without TLS. */

#define _GNU_SOURCE

#include "tls_socket.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/uio.h>

#include "tls_connection.h"

enum {
    RECORD_MOST = 16 << 10, /* bytes in one, by the standard */
    INPUTS = 4,             /* system calls of a receive, at most */
    IDLE_MOST = 32,         /* records without bytes in a row; OpenSSL has the same limit for empty ones */
    /* Then come other keys. Those of AES-GCM are safe for 2^24.5 whole records (RFC 8446, 5.5), which OpenSSL does not
     * count. After 64 MiB a change costs nothing that can be measured, and each test of many blocks makes one. */
    SEALED_MOST = 1 << 12,
};

/* Between OpenSSL and the connection. */

/* Adds what has come to the empty input: 0, EAGAIN, or another errno that is kept. ECONNRESET, and is_closed is true:
 * nothing comes any more. */
static int fill(struct kvf_tls *tls)
{
    ssize_t count;
    if (tls->error || tls->is_closed)
        return tls->error ? tls->error : ECONNRESET;
    if (tls->inputs++ == INPUTS)
        return EAGAIN;
    do
        count = recv(tls->connection, tls->input, INPUT_BYTES, MSG_DONTWAIT);
    while (count < 0 && errno == EINTR);
    if (count < 0)
        return errno == EAGAIN || errno == EWOULDBLOCK ? EAGAIN : (tls->error = errno);
    tls->is_closed = count == 0;
    tls->input_begin = 0;
    tls->input_end = (uint32_t)count;
    return count ? 0 : ECONNRESET;
}

/* Without bytes OpenSSL may always try again: kvf_tls_error knows whether it would be of use. */
static int read_input(BIO *bio, char *target, int size)
{
    struct kvf_tls *tls = kvf_openssl.BIO_get_data(bio);
    kvf_openssl.BIO_clear_flags(bio, BIO_FLAGS_RWS | BIO_FLAGS_SHOULD_RETRY);
    tls->is_starved = tls->input_begin == tls->input_end && fill(tls);
    if (tls->is_starved) {
        kvf_openssl.BIO_set_flags(bio, BIO_FLAGS_READ | BIO_FLAGS_SHOULD_RETRY);
        return -1;
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

bool kvf_tls_make_buffers(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_buffers);
    return buffers;
}

BIO *kvf_tls_buffers(struct kvf_tls *tls)
{
    BIO *bio = kvf_openssl.BIO_new(buffers);
    if (bio) {
        kvf_openssl.BIO_set_data(bio, tls);
        kvf_openssl.BIO_set_init(bio, 1);
    }
    return bio;
}

int kvf_tls_flush(struct kvf_tls *tls)
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

/* Receives. */

int kvf_tls_error(struct kvf_tls *tls, int result)
{
    int error = kvf_openssl.SSL_get_error(tls->ssl, result);
    if (error == SSL_ERROR_ZERO_RETURN)
        tls->is_closed = true;
    if (tls->error)
        return tls->error;
    if (tls->is_closed)
        return ECONNRESET;
    return error == SSL_ERROR_WANT_READ ? EAGAIN : (tls->error = EPROTO);
}

/* The next bytes, of one record at most: 0 or an errno. OpenSSL returns after each message that is no block: the peer
 * may send many of them, and each costs a derivation of keys. */
static int read_some(struct kvf_tls *tls, struct iovec part, size_t *count)
{
    for (;;) {
        int result = kvf_openssl.SSL_read_ex(tls->ssl, part.iov_base, part.iov_len, count);
        if (result == 1) {
            tls->idle = 0;
            return 0;
        }
        int error = kvf_tls_error(tls, result);
        if (error != EAGAIN || tls->is_starved)
            return error;
        if (++tls->idle > IDLE_MOST)
            return tls->error = EPROTO;
    }
}

ssize_t kvf_tls_receive(struct kvf_tls *tls, const struct msghdr *message)
{
    size_t all = 0, count;
    int error = tls->error;
    tls->inputs = 0;
    kvf_openssl.ERR_clear_error();
    for (size_t i = 0; i < message->msg_iovlen && !error; i++) {
        struct iovec part = message->msg_iov[i];
        while (part.iov_len && !(error = read_some(tls, part, &count))) {
            part = (struct iovec){(uint8_t *)part.iov_base + count, part.iov_len - count};
            all += count;
        }
    }
    if (error)
        kvf_openssl.ERR_clear_error();
    if (all)
        return (ssize_t)all;
    if (tls->is_closed)
        return 0;
    errno = error;
    return -1;
}

bool kvf_tls_has_input(const struct kvf_tls *tls)
{
    return tls->input_begin < tls->input_end || tls->is_closed || tls->error || kvf_openssl.SSL_pending(tls->ssl) > 0;
}

/* Sends. */

/* A record of the next `size` bytes, from where they are, or from a copy where they are in several parts. */
static bool seal(struct kvf_tls *tls, struct iovec **part, size_t *at, size_t size)
{
    uint8_t copied[RECORD_MOST];
    const uint8_t *source = copied;
    size_t sealed;
    for (size_t passed = 0, some; passed < size; passed += some) {
        uint8_t *bytes = (uint8_t *)(*part)->iov_base + *at;
        size_t left = (*part)->iov_len - *at;
        some = left < size - passed ? left : size - passed;
        if (some == size)
            source = bytes;
        else
            memcpy(copied + passed, bytes, some);
        *at += some;
        if (*at == (*part)->iov_len) {
            (*part)++;
            *at = 0;
        }
    }
    if (++tls->sealed > SEALED_MOST) {
        tls->sealed = 1;
        if (kvf_openssl.SSL_key_update(tls->ssl, SSL_KEY_UPDATE_NOT_REQUESTED) != 1)
            return false;
    }
    return kvf_openssl.SSL_write_ex(tls->ssl, source, size, &sealed) == 1;
}

/* Forms records of all parts, in the empty output, which has room for them. */
static bool seal_all(struct kvf_tls *tls, const struct msghdr *message)
{
    struct iovec *part = message->msg_iov;
    size_t left = 0, at = 0, size;
    bool is_sealed = true;
    for (size_t i = 0; i < message->msg_iovlen; i++)
        left += part[i].iov_len;
    tls->accepted = (uint32_t)left;
    kvf_openssl.ERR_clear_error();
    for (; left && is_sealed; left -= size) {
        size = left < RECORD_MOST ? left : RECORD_MOST;
        is_sealed = seal(tls, &part, &at, size);
    }
    if (is_sealed)
        return true;
    /* The peer has sent half a message of the handshake, and OpenSSL waits for the rest. No lane does so. */
    kvf_openssl.ERR_clear_error();
    tls->error = EPROTO;
    return false;
}

ssize_t kvf_tls_send(struct kvf_tls *tls, const struct msghdr *message)
{
    int error = tls->error;
    if (!error && !tls->accepted)
        error = kvf_tls_flush(tls);
    if (!error && !tls->accepted && !seal_all(tls, message))
        error = tls->error;
    if (!error)
        error = kvf_tls_flush(tls);
    if (error) {
        errno = error;
        return -1;
    }
    ssize_t all = tls->accepted;
    tls->accepted = 0;
    return all;
}
