/* The pool: jobs that wait, the threads that take their operations, and completions behind a descriptor.
 *
 * One lock guards all of a pool but the bytes. A job is an entry, which is in at most one list: of the free ones, of
 * those with operations to take (one list a priority), of the completed ones. Every path to a completion goes through
 * `end_operations`, under the lock, and an entry has no way back from the list of completed ones but kvf_reap. */

#define _GNU_SOURCE

#include "mover.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "operation.h"
#include "threads.h"

enum {
    BATCH_BYTES = 128 << 10, /* small operations are taken together up to this sum: the lock is taken less often */
    BATCH_MOST = 64,
    MAX_THREADS = 1024,
};

struct entry {
    struct node node;      /* in its list; first */
    struct kvf_job *job;   /* NULL: the entry is in `unused` or `completed` */
    int64_t number;        /* of its last job */
    uint32_t next;         /* operations below it are taken or cancelled */
    uint32_t running;      /* operations that threads have taken and not ended */
    atomic_bool cancelled; /* read by threads without the lock */
};

struct kvf_pool {
    pthread_mutex_t lock;
    pthread_cond_t work;
    unsigned generation; /* of the process that made the pool */
    int descriptor;
    bool stopping;
    uint32_t max_jobs, max_threads, started;
    uint32_t idle;    /* threads without an operation, also those that are only just starting */
    uint64_t waiting; /* operations not taken, of all jobs */
    int64_t sequence;
    struct list unused, queues[KVF_PRIORITIES], completed;
    pthread_t threads[MAX_THREADS];
    struct entry entries[];
};

/* Counts forks on the way from the first process. Cheaper than getpid(), and a pid may be used again. */
static unsigned generation;

static void count_fork(void)
{
    generation++;
}

static __attribute__((constructor)) void watch_forks(void)
{
    pthread_atfork(NULL, NULL, count_fork);
}

static bool is_foreign(const struct kvf_pool *pool)
{
    return pool->generation != generation;
}

int kvf_abi(void)
{
    return KVF_ABI;
}

/* All below, up to `work`, are called with the lock. */

static struct list *queue_of(struct kvf_pool *pool, const struct entry *entry)
{
    return &pool->queues[entry->job->priority];
}

static struct entry *first_waiting(const struct kvf_pool *pool)
{
    for (int priority = 0; priority < KVF_PRIORITIES; priority++)
        if (pool->queues[priority].first)
            return (struct entry *)pool->queues[priority].first;
    return NULL;
}

/* The job completes with its last operation. From then on it is its owner's: the entry alone is in the list. */
static void end_operations(struct kvf_pool *pool, struct entry *entry, uint32_t count)
{
    entry->running -= count;
    if (entry->running || entry->next < entry->job->count)
        return;
    bool rings = !pool->completed.first;
    entry->job = NULL;
    append(&pool->completed, &entry->node);
    if (rings)
        ring(pool->descriptor);
}

/* Takes operations of `entry` for the calling thread and returns their number. */
static uint32_t take(struct kvf_pool *pool, struct entry *entry)
{
    const struct kvf_job *job = entry->job;
    uint32_t begin = entry->next, end = begin + 1;
    uint64_t bytes = job->lengths[begin];
    while (end < job->count && end - begin < BATCH_MOST && bytes <= BATCH_BYTES
           && job->lengths[end] <= BATCH_BYTES - bytes)
        bytes += job->lengths[end++];
    entry->next = end;
    entry->running += end - begin;
    pool->waiting -= end - begin;
    if (end == job->count)
        unlink_node(queue_of(pool, entry), &entry->node);
    return end - begin;
}

static void cancel(struct kvf_pool *pool, struct entry *entry)
{
    struct kvf_job *job = entry->job;
    uint32_t begin = entry->next;
    atomic_store_explicit(&entry->cancelled, true, memory_order_relaxed);
    if (begin == job->count)
        return;
    kvf_operations(job, begin, job->count, &entry->cancelled); /* begins none of them */
    unlink_node(queue_of(pool, entry), &entry->node);
    pool->waiting -= job->count - begin;
    entry->next = job->count;
    end_operations(pool, entry, 0);
}

static void *work(void *argument);

/* Starts a thread if operations wait that no idle one will take. Each thread wakes or starts the next one, so that a
 * caller of kvf_submit pays for one at most. */
static void grow(struct kvf_pool *pool)
{
    if (pool->stopping || pool->started == pool->max_threads || pool->waiting <= pool->idle)
        return;
    if (start_thread(&pool->threads[pool->started], work, pool) == 0) {
        pool->started++;
        pool->idle++;
    }
}

/* A thread of the pool. */
static void *work(void *argument)
{
    struct kvf_pool *pool = argument;
    pthread_setname_np(pthread_self(), "kvferry-mover");
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        struct entry *entry;
        while (!pool->stopping && !(entry = first_waiting(pool)))
            pthread_cond_wait(&pool->work, &pool->lock);
        if (pool->stopping)
            break;
        pool->idle--;
        struct kvf_job *job = entry->job; /* stays: `running` is above 0 until the end below */
        uint32_t begin = entry->next, count = take(pool, entry);
        grow(pool);
        bool wakes = pool->waiting && pool->idle;
        pthread_mutex_unlock(&pool->lock);
        if (wakes)
            pthread_cond_signal(&pool->work);
        kvf_operations(job, begin, begin + count, &entry->cancelled);
        pthread_mutex_lock(&pool->lock);
        pool->idle++;
        end_operations(pool, entry, count);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

/* The calls. */

struct kvf_pool *kvf_pool_new(uint32_t threads, uint32_t max_jobs)
{
    kvf_catch_bus_errors();
    if (!threads || threads > MAX_THREADS || !max_jobs || max_jobs > KVF_MAX_JOBS)
        return NULL;
    struct kvf_pool *pool = calloc(1, sizeof *pool + max_jobs * sizeof pool->entries[0]);
    if (!pool)
        return NULL;
    pool->descriptor = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (pool->descriptor < 0) {
        free(pool);
        return NULL;
    }
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pool->generation = generation;
    pool->max_threads = threads;
    pool->max_jobs = max_jobs;
    for (uint32_t i = 0; i < max_jobs; i++)
        append(&pool->unused, &pool->entries[i].node);
    return pool;
}

int kvf_pool_descriptor(struct kvf_pool *pool)
{
    return is_foreign(pool) ? -ECHILD : pool->descriptor;
}

int64_t kvf_submit(struct kvf_pool *pool, struct kvf_job *job)
{
    if (is_foreign(pool))
        return -ECHILD;
    if (job->kind >= KVF_KINDS || job->priority >= KVF_PRIORITIES)
        return -EINVAL;
    pthread_mutex_lock(&pool->lock);
    struct entry *entry = (struct entry *)pool->unused.first;
    int64_t number = -EAGAIN;
    bool wakes = false;
    if (entry) {
        pool->waiting += job->count;
        grow(pool);
        if (pool->started || !job->count) {
            number = pool->sequence++ * pool->max_jobs + (entry - pool->entries) + 1;
            unlink_node(&pool->unused, &entry->node);
            entry->job = job;
            entry->number = number;
            entry->next = entry->running = 0;
            atomic_store_explicit(&entry->cancelled, false, memory_order_relaxed);
            if (job->count)
                append(queue_of(pool, entry), &entry->node);
            else
                end_operations(pool, entry, 0);
            wakes = job->count && pool->idle;
        } else {
            pool->waiting -= job->count; /* no thread could be started */
        }
    }
    pthread_mutex_unlock(&pool->lock);
    if (wakes)
        pthread_cond_signal(&pool->work);
    return number;
}

int kvf_cancel(struct kvf_pool *pool, int64_t number)
{
    if (is_foreign(pool))
        return -ECHILD;
    int result = -ENOENT;
    pthread_mutex_lock(&pool->lock);
    struct entry *entry = &pool->entries[((uint64_t)number - 1) % pool->max_jobs];
    if (entry->number == number && entry->job) {
        cancel(pool, entry);
        result = 0;
    }
    pthread_mutex_unlock(&pool->lock);
    return result;
}

uint32_t kvf_reap(struct kvf_pool *pool, int64_t *numbers, uint32_t most)
{
    if (is_foreign(pool))
        return 0;
    uint32_t count = 0;
    pthread_mutex_lock(&pool->lock);
    for (struct entry *entry; count < most && (entry = (struct entry *)pool->completed.first); count++) {
        numbers[count] = entry->number;
        unlink_node(&pool->completed, &entry->node);
        append(&pool->unused, &entry->node);
    }
    if (count && !pool->completed.first)
        silence(pool->descriptor);
    pthread_mutex_unlock(&pool->lock);
    return count;
}

void kvf_pool_free(struct kvf_pool *pool)
{
    if (!pool || is_foreign(pool))
        return;
    pthread_mutex_lock(&pool->lock);
    pool->stopping = true; /* no thread takes an operation or starts a thread from now on */
    for (uint32_t i = 0; i < pool->max_jobs; i++)
        if (pool->entries[i].job)
            cancel(pool, &pool->entries[i]);
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    for (uint32_t i = 0; i < pool->started; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->lock);
    close(pool->descriptor);
    free(pool);
}
