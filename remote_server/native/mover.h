/* The mover: jobs of copies, reads and writes, on the calling thread or on the threads of a pool. */

#ifndef KVF_MOVER_H
#define KVF_MOVER_H

#include <stdint.h>

enum { KVF_ABI = 4 }; /* raised with every change of what Python sees: the struct, a function, a constant */

enum { KVF_COPY, KVF_READ, KVF_WRITE, KVF_KINDS };
enum { KVF_HASH = 1, KVF_STREAM = 2 }; /* flags */

enum {
    KVF_PRIORITIES = 3,          /* 0 first */
    KVF_PIECE_BYTES = 256 << 10, /* a copy looks at its cancellation between two of these */
    KVF_CALL_BYTES = 8 << 20,    /* and a read or a write between two of these, at most so much in a system call */
    KVF_MAX_JOBS = 1 << 20,
};

/* Ownership. All memory of a job, its struct, its columns and the bytes that they name, belongs to the mover from
 * kvf_submit until kvf_reap returns its number, or until kvf_pool_free returns. The mover writes the three output
 * columns before the job can be reaped, and touches none of the memory afterwards. */
struct kvf_job {
    uint32_t kind, flags, count, priority;
    const int32_t *files;    /* READ, WRITE */
    const uint64_t *targets; /* addresses, 0 of a COPY that only hashes; WRITE: offsets in the file */
    const uint64_t *sources; /* addresses; READ: offsets in the file */
    const uint64_t *lengths;
    const uint64_t *seeds; /* with HASH */
    uint64_t *done;        /* out: bytes moved, each */
    uint64_t *digests;     /* out, with HASH; meaningful where errors[i] == 0 */
    int32_t *errors;       /* out: 0 or an errno: ECANCELED, EFAULT (SIGBUS), ENODATA (end of file), of read or write */
};

struct kvf_pool;

int kvf_abi(void);

/* The whole job on the calling thread; returns the number of failed operations. */
uint32_t kvf_run(struct kvf_job *job);

/* A pool belongs to the process that made it. In a child of fork every call is refused and touches nothing: -ECHILD,
 * or 0 of kvf_reap. NULL: no memory, no descriptors, or numbers that are 0 or too large. */
struct kvf_pool *kvf_pool_new(uint32_t threads, uint32_t max_jobs);

/* An eventfd, readable exactly while a job waits to be reaped. */
int kvf_pool_descriptor(struct kvf_pool *pool);

/* The job's number, above 0; -EINVAL: an unknown kind or priority; -EAGAIN: max_jobs are not reaped, or there is no
 * thread and none can be started. After an error the job is the caller's. */
int64_t kvf_submit(struct kvf_pool *pool, struct kvf_job *job);

/* 0: operations not begun end with ECANCELED, running ones at their next piece; the job completes as ever.
 * -ENOENT: it has completed. */
int kvf_cancel(struct kvf_pool *pool, int64_t number);

/* The numbers of at most `most` completed jobs, oldest first. Each job is reported once. */
uint32_t kvf_reap(struct kvf_pool *pool, int64_t *numbers, uint32_t most);

/* Cancels all jobs, waits for what runs, joins the threads. Jobs not reaped are the caller's when it returns. No other
 * call for this pool may run at the same time or follow. */
void kvf_pool_free(struct kvf_pool *pool);

#endif
