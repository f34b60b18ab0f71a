/* Blocks on their way through a connection: framed, hashed while they are in the cache, gathered in few system calls. */

#define _GNU_SOURCE

#include "passage.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "mover.h"

enum {
    HASHED_TOGETHER = 4096, /* pieces of a hash are multiples of it, but for the last one */
    /* Two of the packets of just below 64 KiB that the kernel forms. Each call ends a packet, so 128 KiB would be two and
     * a tiny third one: over loopback that took 1.3 times as long, 256 KiB 1.3 times, 60 KiB 1.1 times. */
    SENT_TOGETHER = 120 << 10,
};

static bool hashes(const struct kvf_lane_job *job, uint32_t i)
{
    return job->flags & KVF_HASH && (job->kind == KVF_SEND || job->addresses[i]);
}

/* Hashes block `i` up to about `end`: as far as whole pieces go (receiving), or at least so far (sending). Blocks are
 * hashed in their order; one that is behind the hash is complete. */
static void hash_to(struct kvf_passage *passage, struct kvf_lane_job *job, uint32_t i, uint64_t end)
{
    uint64_t length = job->lengths[i];
    if (!hashes(job, i) || i + 1 < passage->hashes)
        return;
    if (i + 1 > passage->hashes) {
        passage->hashes = i + 1;
        passage->hashed = 0;
        kvf_hash_begin(&passage->hash, job->seeds[i], length);
    } else if (passage->hashed == length) {
        return;
    }
    if (job->kind == KVF_SEND)
        end += HASHED_TOGETHER - 1;
    end = end < length ? end / HASHED_TOGETHER * HASHED_TOGETHER : length;
    if (end > passage->hashed) {
        kvf_hash_piece(&passage->hash, (const uint8_t *)(uintptr_t)job->addresses[i] + passage->hashed,
                       end - passage->hashed);
        passage->hashed = end;
    }
    if (passage->hashed == length)
        job->digests[i] = kvf_hash_end(&passage->hash);
}

static uint64_t trailer_of(const struct kvf_lane_job *job, uint32_t i)
{
    return job->flags & KVF_HASH ? job->digests[i] : job->announced[i];
}

static void encode_header(uint8_t *header, const struct kvf_lane_job *job, uint32_t i)
{
    kvf_store_64(header, job->request);
    kvf_store_64(header + 8, job->lengths[i] << 32 | i);
}

static size_t add(struct iovec *part, void *memory, size_t size)
{
    *part = (struct iovec){memory, size};
    return size;
}

/* The parts of the next piece, in `parts`; returns their size. A SEND hashes what it is about to send. */
static size_t gather(struct kvf_passage *passage, struct kvf_lane_job *job, uint8_t *sink, struct iovec *parts,
                     size_t *count)
{
    bool sends = job->kind == KVF_SEND;
    uint64_t at = passage->passed;
    size_t left = sends ? SENT_TOGETHER : KVF_PIECE_BYTES, all = 0;
    *count = 0;
    for (uint32_t i = passage->index; i < job->count && i - passage->index < KVF_GATHERED && left; i++, at = 0) {
        uint8_t *header = passage->frames[i % KVF_GATHERED].header, *trailer = passage->frames[i % KVF_GATHERED].trailer;
        uint64_t length = job->lengths[i], address = job->addresses[i];
        if (at < KVF_HEADER) {
            if (sends)
                encode_header(header, job, i);
            all += add(&parts[(*count)++], header + at, KVF_HEADER - at);
            at = KVF_HEADER;
        }
        at -= KVF_HEADER;
        if (at < length) {
            size_t size = length - at < left ? length - at : left;
            if (sends)
                hash_to(passage, job, i, at + size);
            all += add(&parts[(*count)++], address || sends ? (uint8_t *)(uintptr_t)address + at : sink, size);
            at += size;
            left -= size;
            if (at < length)
                break;
        }
        if (sends) {
            hash_to(passage, job, i, length); /* an empty block */
            kvf_store_64(trailer, trailer_of(job, i));
        }
        all += add(&parts[(*count)++], trailer + (at - length), KVF_TRAILER - (at - length));
    }
    return all;
}

static void end_block(struct kvf_passage *passage, struct kvf_lane_job *job)
{
    uint32_t i = passage->index;
    if (job->done) {
        if (job->kind == KVF_RECEIVE)
            job->announced[i] = kvf_load_64(passage->frames[i % KVF_GATHERED].trailer);
        job->done[i] = job->lengths[i];
        job->errors[i] = 0;
    }
    passage->index++;
    passage->passed = 0;
}

static bool is_expected(const struct kvf_passage *passage, const struct kvf_lane_job *job)
{
    uint8_t header[KVF_HEADER];
    encode_header(header, job, passage->index);
    return !memcmp(header, passage->frames[passage->index % KVF_GATHERED].header, KVF_HEADER);
}

static uint64_t payload_of(const struct kvf_passage *passage, const struct kvf_lane_job *job)
{
    uint64_t length = job->lengths[passage->index];
    uint64_t payload = passage->passed < KVF_HEADER ? 0 : passage->passed - KVF_HEADER;
    return payload < length ? payload : length;
}

/* Accounts for bytes that have passed. A RECEIVE checks headers and hashes what has come. */
static int advance(struct kvf_passage *passage, struct kvf_lane_job *job, size_t moved)
{
    bool receives = job->kind == KVF_RECEIVE;
    while (moved) {
        uint64_t frame = KVF_HEADER + job->lengths[passage->index] + KVF_TRAILER, before = passage->passed;
        size_t size = frame - before < moved ? frame - before : moved;
        passage->passed += size;
        moved -= size;
        if (receives) {
            if (before < KVF_HEADER && passage->passed >= KVF_HEADER && !is_expected(passage, job))
                return EPROTO;
            if (passage->passed >= KVF_HEADER)
                hash_to(passage, job, passage->index, payload_of(passage, job));
        }
        if (passage->passed == frame)
            end_block(passage, job);
        else if (job->done) /* who waits for the job may look at it */
            __atomic_store_n(&job->done[passage->index], payload_of(passage, job), __ATOMIC_RELAXED);
    }
    return 0;
}

static ssize_t transfer(struct kvf_lane_job *job, int connection, struct kvf_tls *tls, struct msghdr *message)
{
    if (job->kind == KVF_SEND)
        return tls ? kvf_tls_send(tls, message) : sendmsg(connection, message, MSG_DONTWAIT | MSG_NOSIGNAL);
    return tls ? kvf_tls_receive(tls, message) : recvmsg(connection, message, MSG_DONTWAIT);
}

int kvf_pass(struct kvf_passage *passage, struct kvf_lane_job *job, int connection, struct kvf_tls *tls, uint8_t *sink)
{
    struct iovec parts[3 * KVF_GATHERED];
    struct msghdr message = {.msg_iov = parts};
    size_t asked = gather(passage, job, sink, parts, &message.msg_iovlen);
    ssize_t moved;
    do
        moved = transfer(job, connection, tls, &message);
    while (moved < 0 && errno == EINTR);
    if (moved < 0)
        return errno == EWOULDBLOCK ? EAGAIN : errno;
    if (!moved)
        return KVF_CLOSED;
    int error = advance(passage, job, (size_t)moved);
    return error ? error : (size_t)moved < asked ? EAGAIN : 0;
}

void kvf_end_passage(const struct kvf_passage *passage, struct kvf_lane_job *job, int32_t error)
{
    for (uint32_t i = passage->index; i < job->count; i++) {
        job->done[i] = i == passage->index ? payload_of(passage, job) : 0;
        job->errors[i] = error;
    }
}
