/* One operation: a copy, a read or a write in pieces, and its rescue from SIGBUS.
 *
 * A file that is truncated under a map makes an access to the map raise SIGBUS. Inside an operation, and at an
 * address of that operation, the handler jumps back and the operation ends with EFAULT. Every other SIGBUS goes to
 * the handler that was installed before this one. */

#define _GNU_SOURCE

#include "operation.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdbool.h>
#include <unistd.h>

#include "bytes.h"

/* The memory that an operation may touch, while it does. It stands on the operation's stack. */
struct guard {
    sigjmp_buf rescue;
    uintptr_t target, source; /* addresses; 0 where it is a file's offset */
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

/* Pieces. They add to `done` as bytes have moved: after a jump it has what they left. */

static size_t piece_of(uint64_t left)
{
    return left < KVF_PIECE_BYTES ? left : KVF_PIECE_BYTES;
}

static bool is_cancelled(const atomic_bool *cancelled)
{
    return cancelled && atomic_load_explicit(cancelled, memory_order_relaxed);
}

static int32_t copy(const struct kvf_job *job, uint32_t i, struct kvf_hash *hash, uint64_t at, size_t size,
                    volatile uint64_t *done)
{
    uint8_t *target = (uint8_t *)(uintptr_t)job->targets[i];
    const uint8_t *source = (const uint8_t *)(uintptr_t)job->sources[i];
    if (target)
        kvf_copy_piece(hash, target + at, source + at, size, job->flags & KVF_STREAM);
    else if (hash)
        kvf_hash_piece(hash, source + at, size);
    *done = at + size;
    return 0;
}

static int32_t read_or_write(const struct kvf_job *job, uint32_t i, struct kvf_hash *hash, uint64_t at, size_t size,
                             volatile uint64_t *done)
{
    bool reads = job->kind == KVF_READ;
    uint8_t *memory = (uint8_t *)(uintptr_t)(reads ? job->targets[i] : job->sources[i]) + at;
    uint64_t offset = (reads ? job->sources[i] : job->targets[i]) + at;
    if (hash && !reads)
        kvf_hash_piece(hash, memory, size);
    for (size_t have = 0; have < size;) { /* the hash needs whole pieces */
        ssize_t count = reads ? pread(job->files[i], memory + have, size - have, (off_t)(offset + have))
                              : pwrite(job->files[i], memory + have, size - have, (off_t)(offset + have));
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            return count ? errno : reads ? ENODATA : EIO;
        have += (size_t)count;
        *done = at + have;
    }
    if (hash && reads)
        kvf_hash_piece(hash, memory, size);
    return 0;
}

/* Not inlined into the function that is jumped to: its locals are then in no register that the jump restores. */
__attribute__((noinline)) static int32_t move(struct kvf_job *job, uint32_t i, const atomic_bool *cancelled,
                                              volatile uint64_t *done)
{
    struct kvf_hash state, *hash = NULL;
    if (is_cancelled(cancelled))
        return ECANCELED;
    if (job->flags & KVF_HASH) {
        hash = &state;
        kvf_hash_begin(hash, job->seeds[i], job->lengths[i]);
    }
    int32_t error = 0;
    for (uint64_t at = 0, length = job->lengths[i]; at < length && !error;) {
        size_t size = piece_of(length - at);
        if (is_cancelled(cancelled))
            return ECANCELED;
        error = (job->kind == KVF_COPY ? copy : read_or_write)(job, i, hash, at, size, done);
        at += size;
    }
    if (hash && !error)
        job->digests[i] = kvf_hash_end(hash);
    return error;
}

void kvf_operation(struct kvf_job *job, uint32_t i, const atomic_bool *cancelled)
{
    volatile uint64_t done = 0;
    int32_t error = EFAULT;
    struct guard guard = {
        .target = job->kind == KVF_WRITE ? 0 : job->targets[i],
        .source = job->kind == KVF_READ ? 0 : job->sources[i],
        .length = job->lengths[i],
    };
    if (sigsetjmp(guard.rescue, 0) == 0) {
        guarded = &guard;
        error = move(job, i, cancelled, &done);
    } else {
        atomic_thread_fence(memory_order_seq_cst); /* streaming stores before the fault */
    }
    guarded = NULL;
    job->done[i] = done;
    job->errors[i] = error;
}

void kvf_not_begun(struct kvf_job *job, uint32_t i, int32_t error)
{
    job->done[i] = 0;
    job->errors[i] = error;
}

uint32_t kvf_run(struct kvf_job *job)
{
    kvf_catch_bus_errors();
    uint32_t failed = 0;
    for (uint32_t i = 0; i < job->count; i++) {
        if (job->kind < KVF_KINDS)
            kvf_operation(job, i, NULL);
        else
            kvf_not_begun(job, i, EINVAL);
        failed += job->errors[i] != 0;
    }
    return failed;
}
