/* Operations: copies in pieces, reads and writes of neighbours in one call, and their rescue from SIGBUS.
 *
 * A file that is truncated under a map makes an access to the map raise SIGBUS. While a piece is copied or hashed, and
 * at an address of that piece, the handler jumps back and the operation ends with EFAULT. Every other SIGBUS goes to
 * the handler that was installed before this one. In a read or a write the kernel touches the memory: it returns
 * EFAULT. */

#define _GNU_SOURCE

#include "operation.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/uio.h>
#include <unistd.h>

#include "bytes.h"

/* The memory of a piece, while it is touched. It stands on the stack of `pass`. */
struct guard {
    sigjmp_buf rescue;
    uintptr_t target, source; /* target: 0 where the piece is only hashed */
    uintptr_t length;
};

/* The handler reads it. In glibc another model could allocate at the first access, which a handler must not. */
#ifdef __GLIBC__
__attribute__((tls_model("initial-exec")))
#endif
static _Thread_local struct guard *volatile guarded;

static struct sigaction former; /* written once, before the handler can run */

static bool touches(uintptr_t begin, uintptr_t length, uintptr_t address)
{
    uintptr_t page = 4095; /* a kernel may report the page instead of the byte */
    return begin && address >= (begin & ~page) && address <= ((begin + length) | page);
}

static bool is_rescued(const struct guard *guard, const siginfo_t *info)
{
    if (!guard)
        return false;
    /* A handler that was installed after this one, handled the fault first and raised it again: faulthandler. */
    if (info->si_code == SI_TKILL)
        return info->si_pid == getpid();
    if (info->si_code <= 0 || info->si_code == BUS_MCEERR_AO) /* of kill(), or not about this access */
        return false;
    uintptr_t address = (uintptr_t)info->si_addr;
    return touches(guard->target, guard->length, address) || touches(guard->source, guard->length, address);
}

/* As the kernel would have called it: with its mask, its flags. */
static void call_former(int number, siginfo_t *info, void *context)
{
    bool is_fault = info->si_code > 0;
    bool takes_info = former.sa_flags & SA_SIGINFO;
    if (!takes_info && former.sa_handler == SIG_IGN && !is_fault)
        return;
    if (!takes_info && (former.sa_handler == SIG_DFL || former.sa_handler == SIG_IGN)) {
        struct sigaction fatal = {.sa_handler = SIG_DFL};
        sigaction(number, &fatal, NULL);
        if (!is_fault)
            raise(number);
        return; /* the access faults again */
    }
    sigset_t mask = former.sa_mask, before;
    if (!(former.sa_flags & SA_NODEFER))
        sigaddset(&mask, number);
    pthread_sigmask(SIG_BLOCK, &mask, &before);
    if (takes_info)
        former.sa_sigaction(number, info, context);
    else
        former.sa_handler(number);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void on_bus_error(int number, siginfo_t *info, void *context)
{
    int kept = errno;
    if (is_rescued(guarded, info))
        siglongjmp(guarded->rescue, 1);
    call_former(number, info, context);
    errno = kept;
}

static void install(void)
{
    /* NODEFER: the jump leaves the handler, and the mask must be right without a system call. */
    struct sigaction ours = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};
    sigaction(SIGBUS, NULL, &former);
    sigaction(SIGBUS, &ours, NULL);
}

void kvf_catch_bus_errors(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, install);
}

/* Copies and hashes a piece (`target`, `hash` may be NULL): 0, or EFAULT, when any part of it may be stored and hashed.
 * Not inlined: the jump restores the registers of this call alone, and it sets no variable after `sigsetjmp`. */
__attribute__((noinline)) static int32_t pass(struct kvf_hash *hash, uint8_t *target, const uint8_t *source,
                                              size_t size, bool streams)
{
    struct guard guard = {.target = (uintptr_t)target, .source = (uintptr_t)source, .length = size};
    if (sigsetjmp(guard.rescue, 0)) {
        guarded = NULL;
        atomic_thread_fence(memory_order_seq_cst); /* streaming stores before the fault */
        return EFAULT;
    }
    guarded = &guard;
    if (target)
        kvf_copy_piece(hash, target, source, size, streams);
    else if (hash)
        kvf_hash_piece(hash, source, size);
    guarded = NULL;
    return 0;
}

/* The operation under way. */
struct current {
    uint32_t i;
    uint64_t at; /* so many bytes of it are moved and hashed */
    struct kvf_hash hash;
};

static void end(struct kvf_job *job, struct current *now, int32_t error)
{
    job->done[now->i] = now->at;
    job->errors[now->i] = error;
    if (job->flags & KVF_HASH && !error)
        job->digests[now->i] = kvf_hash_end(&now->hash);
    now->i++;
    now->at = 0;
}

/* Passes the next piece, of memory at `source` that goes to `target`, or is only hashed where that is 0. The operation
 * ends with its last piece, and with one that fails. */
static void next_piece(struct kvf_job *job, struct current *now, uint64_t target, uint64_t source, size_t size)
{
    struct kvf_hash *hash = job->flags & KVF_HASH ? &now->hash : NULL;
    if (hash && !now->at)
        kvf_hash_begin(hash, job->seeds[now->i], job->lengths[now->i]);
    int32_t error = pass(hash, (uint8_t *)(uintptr_t)(target ? target + now->at : 0),
                         (const uint8_t *)(uintptr_t)(source + now->at), size, job->flags & KVF_STREAM);
    if (!error)
        now->at += size;
    if (error || now->at == job->lengths[now->i])
        end(job, now, error);
}

/* Files. */

enum { CALL_PARTS = 512 }; /* the kernel takes 1024 */

static const uint64_t *memory_of(const struct kvf_job *job)
{
    return job->kind == KVF_READ ? job->targets : job->sources;
}

static const uint64_t *offsets_of(const struct kvf_job *job)
{
    return job->kind == KVF_READ ? job->sources : job->targets;
}

/* Whether operation i continues the one before it in the same file. */
static bool continues(const struct kvf_job *job, uint32_t i)
{
    return job->files[i] == job->files[i - 1] && offsets_of(job)[i] == offsets_of(job)[i - 1] + job->lengths[i - 1];
}

static struct iovec part_of(const struct kvf_job *job, uint32_t i, uint64_t at, uint64_t size)
{
    return (struct iovec){(void *)(uintptr_t)(memory_of(job)[i] + at), size};
}

/* The parts of one call: the next piece of the present operation; if that is its last, whole ones that continue it. */
static uint32_t gather(const struct kvf_job *job, const struct current *now, uint32_t end, struct iovec *parts)
{
    uint64_t left = job->lengths[now->i] - now->at, size = kvf_least(left, KVF_CALL_BYTES);
    uint64_t room = KVF_CALL_BYTES - size;
    uint32_t count = 0;
    parts[count++] = part_of(job, now->i, now->at, size);
    for (uint32_t i = now->i + 1; size == left && i < end && count < CALL_PARTS; i++) {
        if (!continues(job, i) || job->lengths[i] > room)
            break;
        room -= job->lengths[i];
        parts[count++] = part_of(job, i, 0, job->lengths[i]);
    }
    return count;
}

/* Moves the parts: 0 or an errno. `*moved` counts their bytes, from the first part on. */
static int32_t transfer(const struct kvf_job *job, const struct current *now, struct iovec *parts, uint32_t count,
                        uint64_t *moved)
{
    uint64_t offset = offsets_of(job)[now->i] + now->at, taken = 0;
    for (*moved = 0;; *moved += taken) {
        for (; count && taken >= parts->iov_len; count--)
            taken -= parts++->iov_len;
        if (!count)
            return 0;
        parts->iov_base = (uint8_t *)parts->iov_base + taken;
        parts->iov_len -= taken;
        ssize_t size = (job->kind == KVF_READ ? preadv : pwritev)(job->files[now->i], parts, (int)count,
                                                                   (off_t)(offset + *moved));
        if (size <= 0 && !(size && errno == EINTR))
            return size ? errno : job->kind == KVF_READ ? ENODATA : EIO;
        taken = size < 0 ? 0 : (uint64_t)size;
    }
}

/* One call, and what it moved. An error of a call for several operations does not show which of them it is about: those
 * that it left are moved each by itself, up to `*alone`. */
static void read_or_write(struct kvf_job *job, struct current *now, uint32_t end_of_job, uint32_t *alone)
{
    struct iovec parts[CALL_PARTS];
    uint64_t moved;
    uint32_t first = now->i, count = gather(job, now, first < *alone ? first + 1 : end_of_job, parts);
    int32_t error = transfer(job, now, parts, count, &moved);
    for (uint32_t part = 0; part < count; part++) {
        uint64_t size = kvf_least(job->lengths[now->i] - now->at, KVF_CALL_BYTES);
        if (moved < size) {
            *alone = first + count;
            if (count > 1)
                return;
            now->at += moved;
            end(job, now, error);
            return;
        }
        moved -= size;
        next_piece(job, now, 0, memory_of(job)[now->i], size);
    }
}

void kvf_operations(struct kvf_job *job, uint32_t begin, uint32_t end_of_job, const atomic_bool *cancelled)
{
    struct current now = {.i = begin};
    for (uint32_t alone = begin; now.i < end_of_job;) {
        uint32_t i = now.i;
        if (cancelled && atomic_load_explicit(cancelled, memory_order_relaxed))
            end(job, &now, ECANCELED);
        else if (job->kind == KVF_COPY)
            next_piece(job, &now, job->targets[i], job->sources[i],
                       kvf_least(job->lengths[i] - now.at, KVF_PIECE_BYTES));
        else if (job->kind < KVF_KINDS)
            read_or_write(job, &now, end_of_job, &alone);
        else
            end(job, &now, EINVAL);
    }
}

uint32_t kvf_run(struct kvf_job *job)
{
    kvf_catch_bus_errors();
    kvf_operations(job, 0, job->count, NULL);
    uint32_t failed = 0;
    for (uint32_t i = 0; i < job->count; i++)
        failed += job->errors[i] != 0;
    return failed;
}
