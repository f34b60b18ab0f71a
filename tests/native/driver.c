/* Random jobs of the mover from several threads, for the sanitizers.
 *
 *     driver SECONDS SEED
 *
 * In each round threads share a pool: they submit, cancel and reap jobs, of copies, reads and writes of good and bad
 * memory and files, until the pool is freed with jobs in it. A job's memory is freed as soon as it is reaped, so that a
 * later access by the mover is an error of AddressSanitizer. Exits with 0, or aborts with a line about the first wrong
 * result. */

#define _GNU_SOURCE

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "bytes.h"
#include "driver.h"
#include "mover.h"

enum { SUBMITTERS = 3, MOST_OPERATIONS = 12, MAX_JOBS = 16, TABLE = 1 << 16, FILE_BYTES = 700 << 10, PAGE = 4096 };

#ifdef __SANITIZE_THREAD__ /* it ends the process at a SIGBUS inside its own memcpy */
enum { LOSES_MEMORY = false };
#else
enum { LOSES_MEMORY = true };
#endif

/* An operation's memory, and what it may come to. */
struct operation {
    uint8_t *memory, *other; /* other: the source of a copy, the bytes that a read should bring */
    uint64_t mapped;         /* above 0: memory is a map of so many bytes, of a file that was truncated */
    int32_t fails;           /* its error if it is not cancelled; with lost memory EFAULT is another one */
};

struct task {
    struct kvf_job job; /* first: its address is the task's */
    int64_t number;
    int file; /* of WRITE */
    struct operation operations[MOST_OPERATIONS];
};

static struct {
    struct kvf_pool *pool;
    _Atomic(struct task *) table[TABLE]; /* submitted tasks by their number */
    atomic_long submitted, reaped, newest;
    atomic_bool ends;
} round_;

static int pattern_file;
static uint8_t pattern[FILE_BYTES];

static uint8_t *random_bytes(uint64_t *state, uint64_t length)
{
    uint8_t *bytes = malloc(length ? length : 1);
    CHECK(bytes, "no memory");
    uint64_t begin = below(state, FILE_BYTES - length);
    memcpy(bytes, pattern + begin, length);
    return bytes;
}

static uint64_t *column(const struct task *task)
{
    uint64_t *numbers = calloc(task->job.count ? task->job.count : 1, sizeof *numbers);
    CHECK(numbers, "no memory");
    return numbers;
}

/* Memory of `length` bytes whose last page is beyond the end of its file. */
static void truncate_memory(struct operation *operation, uint64_t length)
{
    operation->mapped = (length + PAGE - 1) / PAGE * PAGE;
    int file = memfd_create("truncated", 0);
    CHECK(file >= 0 && ftruncate(file, (off_t)operation->mapped) == 0, "memfd");
    operation->memory = mmap(NULL, operation->mapped, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    CHECK(operation->memory != MAP_FAILED, "mmap");
    CHECK(ftruncate(file, (off_t)(operation->mapped - PAGE)) == 0, "ftruncate");
    close(file);
    operation->fails = EFAULT;
}

static struct task *make_task(uint64_t *state)
{
    struct task *task = calloc(1, sizeof *task);
    CHECK(task, "no memory");
    struct kvf_job *job = &task->job;
    job->kind = (uint32_t)below(state, KVF_KINDS);
    job->flags = (uint32_t)below(state, 4);
    job->priority = (uint32_t)below(state, KVF_PRIORITIES);
    job->count = (uint32_t)below(state, MOST_OPERATIONS + 1);
    uint64_t *targets = column(task), *sources = column(task), *lengths = column(task), *seeds = column(task);
    int32_t *files = (int32_t *)column(task);
    task->file = job->kind == KVF_WRITE ? memfd_create("written", 0) : -1;
    for (uint32_t i = 0; i < job->count; i++) {
        struct operation *operation = &task->operations[i];
        lengths[i] = random_length(state);
        seeds[i] = draw(state);
        if (LOSES_MEMORY && lengths[i] && below(state, 20) == 0)
            truncate_memory(operation, lengths[i]);
        else
            operation->memory = random_bytes(state, lengths[i]);
        files[i] = job->kind == KVF_WRITE ? task->file : pattern_file;
        targets[i] = sources[i] = (uintptr_t)operation->memory;
        if (job->kind == KVF_COPY) {
            operation->other = random_bytes(state, lengths[i]);
            *(operation->mapped ? &targets[i] : &sources[i]) = (uintptr_t)operation->other;
        } else if (job->kind == KVF_WRITE) {
            targets[i] = i && below(state, 2) ? targets[i - 1] + lengths[i - 1] : i * UINT64_C(1000000);
        } else {
            uint64_t next = i ? sources[i - 1] + lengths[i - 1] : FILE_BYTES;
            sources[i] = next < FILE_BYTES && below(state, 2) ? next : below(state, FILE_BYTES);
            if (lengths[i] > FILE_BYTES - sources[i])
                operation->fails = ENODATA;
        }
        if (lengths[i] && job->kind != KVF_COPY && below(state, 20) == 0) {
            files[i] = 1 << 20;
            operation->fails = EBADF;
        }
    }
    job->targets = targets;
    job->sources = sources;
    job->lengths = lengths;
    job->seeds = seeds;
    job->files = files;
    job->done = column(task);
    job->digests = column(task);
    job->errors = (int32_t *)column(task);
    for (uint32_t i = 0; i < job->count; i++)
        job->errors[i] = -1; /* a result must overwrite it */
    return task;
}

static const uint8_t *expected(const struct task *task, uint32_t i)
{
    const struct operation *operation = &task->operations[i];
    if (task->job.kind == KVF_READ)
        return pattern + task->job.sources[i];
    return task->job.kind == KVF_COPY ? operation->other : operation->memory;
}

static void check_operation(const struct task *task, uint32_t i, bool may_be_cancelled)
{
    const struct kvf_job *job = &task->job;
    int32_t error = job->errors[i];
    uint64_t done = job->done[i], length = job->lengths[i];
    CHECK(done <= length, "%lu of %lu", (long)done, (long)length);
    if (error == ECANCELED) {
        CHECK(may_be_cancelled, "operation %u of %lu was not cancelled", i, (long)task->number);
        return;
    }
    bool is_lost = task->operations[i].mapped && error == EFAULT;
    CHECK(is_lost || error == task->operations[i].fails, "%d, not %d", error, task->operations[i].fails);
    if (error)
        return;
    CHECK(done == length, "%lu of %lu", (long)done, (long)length);
    const uint8_t *bytes = expected(task, i);
    if (job->kind == KVF_WRITE) {
        uint8_t *written = malloc(length + 1);
        ssize_t count = pread(task->file, written, length, (off_t)job->targets[i]);
        CHECK(count == (ssize_t)length && !memcmp(written, bytes, length), "written bytes");
        free(written);
    } else {
        CHECK(!memcmp(task->operations[i].memory, bytes, length), "bytes");
    }
    if (job->flags & KVF_HASH)
        CHECK(job->digests[i] == kvf_xxh3(bytes, length, job->seeds[i]), "digest");
}

/* The task is this thread's again. */
static void end_task(struct task *task, bool may_be_cancelled)
{
    struct kvf_job *job = &task->job;
    for (uint32_t i = 0; i < job->count; i++) {
        check_operation(task, i, may_be_cancelled);
        free(task->operations[i].other);
        if (task->operations[i].mapped)
            munmap(task->operations[i].memory, task->operations[i].mapped);
        else
            free(task->operations[i].memory);
    }
    void *columns[] = {(void *)job->targets, (void *)job->sources, (void *)job->lengths, (void *)job->seeds,
                       (void *)job->files,   job->done,            job->digests,         job->errors};
    for (size_t i = 0; i < sizeof columns / sizeof columns[0]; i++)
        free(columns[i]);
    if (task->file >= 0)
        close(task->file);
    free(task);
}

/* Each number is reaped once: a second time there is nothing in the table, and this waits for ever. */
static void reap_some(uint64_t *state)
{
    int64_t numbers[4];
    uint32_t count = kvf_reap(round_.pool, numbers, 1 + (uint32_t)below(state, 4));
    for (uint32_t i = 0; i < count; i++) {
        struct task *task;
        while (!(task = atomic_exchange(&round_.table[numbers[i] % TABLE], NULL)))
            sched_yield(); /* its submitter has not written it yet */
        CHECK(task->number == numbers[i], "%ld instead of %ld", (long)task->number, (long)numbers[i]);
        CHECK(kvf_cancel(round_.pool, numbers[i]) == -ENOENT, "a reaped job was cancelled");
        atomic_fetch_add(&round_.reaped, 1);
        end_task(task, true);
    }
}

static void submit(uint64_t *state)
{
    struct task *task = make_task(state);
    int64_t number = kvf_submit(round_.pool, &task->job);
    if (number == -EAGAIN) {
        kvf_run(&task->job);
        end_task(task, false);
        return;
    }
    CHECK(number > 0, "%ld", (long)number);
    task->number = number; /* not the mover's */
    CHECK(!atomic_exchange(&round_.table[number % TABLE], task), "number %ld is another's", (long)number);
    atomic_fetch_add(&round_.submitted, 1);
    atomic_store(&round_.newest, number);
}

static void *run_thread(void *seed)
{
    uint64_t state = (uintptr_t)seed;
    while (!atomic_load(&round_.ends)) {
        switch (below(&state, 8)) {
        case 0: {
            int64_t number = atomic_load(&round_.newest) - (int64_t)below(&state, 3 * MAX_JOBS);
            int result = kvf_cancel(round_.pool, number);
            CHECK(result == 0 || result == -ENOENT, "%d", result);
            break;
        }
        case 1: case 2: case 3: {
            struct pollfd ready = {.fd = kvf_pool_descriptor(round_.pool), .events = POLLIN};
            poll(&ready, 1, 1);
            reap_some(&state);
            break;
        }
        default:
            submit(&state);
        }
    }
    return NULL;
}

static void run_round(uint64_t *state)
{
    round_.pool = kvf_pool_new(1 + (uint32_t)below(state, 4), MAX_JOBS);
    CHECK(round_.pool, "no pool");
    atomic_store(&round_.ends, false);
    atomic_store(&round_.submitted, 0);
    atomic_store(&round_.reaped, 0);
    atomic_store(&round_.newest, 0);
    pthread_t threads[SUBMITTERS];
    for (int i = 0; i < SUBMITTERS; i++)
        CHECK(pthread_create(&threads[i], NULL, run_thread, (void *)(uintptr_t)(draw(state) | 1)) == 0, "no thread");
    struct timespec pause = {.tv_nsec = (long)below(state, 100000000)};
    nanosleep(&pause, NULL);
    atomic_store(&round_.ends, true);
    for (int i = 0; i < SUBMITTERS; i++)
        pthread_join(threads[i], NULL);
    kvf_pool_free(round_.pool);
    long left = 0;
    for (int i = 0; i < TABLE; i++) {
        struct task *task = atomic_exchange(&round_.table[i], NULL);
        if (task) {
            end_task(task, true);
            left++;
        }
    }
    CHECK(atomic_load(&round_.submitted) == atomic_load(&round_.reaped) + left, "%ld", left);
}

int main(int count, char **arguments)
{
    CHECK(count == 3, "SECONDS SEED");
    uint64_t state = begin(arguments, pattern, FILE_BYTES);
    pattern_file = memfd_create("pattern", 0);
    CHECK(write(pattern_file, pattern, FILE_BYTES) == FILE_BYTES, "memfd");
    long rounds = 0, jobs = 0;
    do {
        run_round(&state);
        rounds++;
        jobs += atomic_load(&round_.submitted);
    } while (goes_on());
    printf("%ld jobs in %ld pools\n", jobs, rounds);
    return 0;
}
