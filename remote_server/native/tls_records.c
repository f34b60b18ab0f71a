/* Blocks through TLS, after the handshake: records are sealed into a buffer that the socket empties, and opened from
 * one that it fills, each by as large system calls as without TLS. */

#define _GNU_SOURCE

#include "tls_records.h"

#include <errno.h>
#include <string.h>
#include <sys/uio.h>

#include "tls_connection.h"

enum {
    RECORD_SEALED = KVF_RECORD_MOST + 256, /* the most that a record has after its header */
    AT_ONCE = 1 << 10,                     /* one that has so much is opened where its bytes belong, not copied there */
    INPUTS = 4,                            /* system calls of a receive, at most */
    IDLE_MOST = 32,                        /* records without bytes in a row */
    /* Then come other keys: those of AES-GCM are safe for 2^24.5 whole records (section 5.5). */
    SEALED_MOST = 1 << 23,
};

int kvf_tls_fill(struct kvf_tls *tls)
{
    ssize_t count;
    if (tls->error || tls->is_closed)
        return tls->error ? tls->error : ECONNRESET;
    memmove(tls->input, tls->input + tls->input_begin, tls->input_end - tls->input_begin);
    tls->input_end -= tls->input_begin;
    tls->input_begin = 0;
    do
        count = recv(tls->connection, tls->input + tls->input_end, INPUT_BYTES - tls->input_end, MSG_DONTWAIT);
    while (count < 0 && errno == EINTR);
    if (count < 0)
        return errno == EAGAIN || errno == EWOULDBLOCK ? EAGAIN : (tls->error = errno);
    tls->is_closed = count == 0;
    tls->input_end += (uint32_t)count;
    return count ? 0 : ECONNRESET;
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

/* A whole record is in the input, or one that is none. */
static bool has_record(const struct kvf_tls *tls)
{
    const uint8_t *record = tls->input + tls->input_begin;
    uint32_t size = tls->input_end - tls->input_begin;
    return !tls->is_closed && size >= KVF_RECORD_HEADER &&
           (kvf_sealed(record) > RECORD_SEALED || size >= KVF_RECORD_HEADER + kvf_sealed(record));
}

bool kvf_tls_has_input(const struct kvf_tls *tls)
{
    return tls->opened < tls->opened_end || tls->error || has_record(tls);
}

/* The peer closes the connection, or has other keys from its next record on. Tickets of a server are ignored. False: it
 * may send nothing else. */
static bool obey(struct kvf_tls *tls, uint8_t type, const uint8_t *message, int64_t size)
{
    static const uint8_t update[] = {24, 0, 0, 1};
    if (type == KVF_ALERT && size == 2 && message[1] == 0)
        return tls->is_closed = true;
    if (type == KVF_HANDSHAKE && size && message[0] == 4 && !tls->is_server)
        return true;
    if (type != KVF_HANDSHAKE || size != sizeof update + 1 || memcmp(message, update, sizeof update) ||
        message[sizeof update] > 1)
        return false;
    tls->owes_update |= message[sizeof update];
    return kvf_keys_update(&tls->receives);
}

/* Opens the record that is whole: 0 or an errno. If `room` suffices for its bytes they pass to `target`, and `all`
 * counts them. The job's memory has them before they are known to be the peer's. They are reported afterwards, or
 * become zeros. */
static int open_record(struct kvf_tls *tls, struct kvf_place *target, size_t room, size_t *all)
{
    uint8_t *record = tls->input + tls->input_begin;
    size_t sealed = kvf_sealed(record);
    struct kvf_opened opened = {.size = -1};
    if (record[0] == KVF_DATA && sealed <= RECORD_SEALED)
        opened = kvf_open(&tls->receives, record, sealed >= AT_ONCE && sealed <= room ? target : NULL);
    bool has_bytes = opened.size > 0 && opened.type == KVF_DATA;
    tls->idle = has_bytes ? 0 : tls->idle + 1;
    if (opened.size < 0 || tls->idle > IDLE_MOST ||
        (opened.type != KVF_DATA && !obey(tls, opened.type, record + KVF_RECORD_HEADER, opened.size)))
        return tls->error = EPROTO;
    tls->opened = tls->opened_end = tls->input_begin + KVF_RECORD_HEADER;
    if (has_bytes)
        *(opened.is_in_place ? &tls->opened_end : all) += (size_t)opened.size;
    tls->input_begin += (uint32_t)(KVF_RECORD_HEADER + sealed);
    return 0;
}

static size_t size_of(const struct msghdr *message)
{
    size_t size = 0;
    for (size_t i = 0; i < message->msg_iovlen; i++)
        size += message->msg_iov[i].iov_len;
    return size;
}

ssize_t kvf_tls_receive(struct kvf_tls *tls, const struct msghdr *message)
{
    struct kvf_place target = {message->msg_iov, 0};
    size_t asked = size_of(message), all = 0;
    int error = tls->error;
    for (int inputs = 0; all < asked && !error;) {
        if (tls->opened < tls->opened_end) {
            uint8_t *bytes;
            size_t left = tls->opened_end - tls->opened;
            size_t size = kvf_pass_bytes(&target, left < asked - all ? left : asked - all, &bytes);
            memcpy(bytes, tls->input + tls->opened, size);
            tls->opened += size;
            all += size;
        } else if (has_record(tls)) {
            error = open_record(tls, &target, asked - all, &all);
        } else {
            error = inputs++ < INPUTS ? kvf_tls_fill(tls) : EAGAIN;
        }
    }
    if (all)
        return (ssize_t)all;
    if (tls->is_closed)
        return 0;
    errno = error;
    return -1;
}

/* Other keys for what is sent. */
static bool update(struct kvf_tls *tls)
{
    struct iovec part = {(uint8_t[]){24, 0, 0, 1, 0}, 5}; /* a KeyUpdate that requests none */
    struct kvf_place source = {&part, 0};
    tls->owes_update = false;
    if (!kvf_seal(&tls->sends, tls->output + tls->output_end, KVF_HANDSHAKE, &source, part.iov_len))
        return false;
    tls->output_end += (uint32_t)part.iov_len + KVF_RECORD_MORE;
    return kvf_keys_update(&tls->sends);
}

/* Forms records of all parts, in the empty output. */
static bool encrypt(struct kvf_tls *tls, const struct msghdr *message)
{
    struct kvf_place source = {message->msg_iov, 0};
    bool is_sealed = !(tls->owes_update || tls->sends.sequence >= SEALED_MOST) || update(tls);
    for (size_t left = size_of(message), size; left && is_sealed; left -= size) {
        size = left < KVF_RECORD_MOST ? left : KVF_RECORD_MOST;
        is_sealed = kvf_seal(&tls->sends, tls->output + tls->output_end, KVF_DATA, &source, size);
        tls->output_end += (uint32_t)(size + KVF_RECORD_MORE);
        tls->accepted += (uint32_t)size;
    }
    if (!is_sealed)
        tls->error = EPROTO;
    return is_sealed;
}

ssize_t kvf_tls_send(struct kvf_tls *tls, const struct msghdr *message)
{
    int error = tls->error;
    if (!error && !tls->accepted)
        error = kvf_tls_flush(tls);
    if (!error && !tls->accepted && !encrypt(tls, message))
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
