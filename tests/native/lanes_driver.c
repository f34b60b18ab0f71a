/* Random messages between lanes from several threads: lanes_driver SECONDS SEED [CERTIFICATE KEY DIGEST].
 *
 * Rounds of lanes over socket pairs whose two ends belong to the same `struct kvf_lanes`: jobs with good and wrong
 * headers, abandoned jobs, closed lanes, until the lanes are freed with jobs in them. A job's memory is freed as soon as
 * it is reaped or abandoned, so that a later access is an error of AddressSanitizer. Exits with 0, or aborts with a line
 * about the first wrong result. With the files, which are in DER, all blocks are encrypted. */

#define _GNU_SOURCE

#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "bytes.h"
#include "driver.h"
#include "lanes.h"
#include "mover.h"
#include "tls.h"

enum { CALLERS = 3, MOST_BLOCKS = 50, LINKS = 4, MOST_TASKS = 32, PATTERN_BYTES = 3 << 20 };

struct link {
    struct kvf_lane *ends[2]; /* NULL: closed or reported */
    bool breaks;              /* an end was closed or may have broken */
};

struct task {
    struct kvf_lane_job job;
    struct kvf_entry *entry;
    struct link *link;
    uint8_t *memory; /* of all blocks, one after another */
    uint64_t begins[MOST_BLOCKS];
};

/* `lock` is the one that kvf_lanes wants around its calls. It guards all of this. */
static struct {
    pthread_mutex_t lock;
    struct kvf_lanes *lanes;
    struct link *links; /* those in use, and behind them those that were replaced */
    uint32_t num_links;
    struct task *tasks[MOST_TASKS]; /* submitted */
    long submitted, ended;
    bool ends;
} round_ = {.lock = PTHREAD_MUTEX_INITIALIZER};

enum { MOST_LINKS = 4096 };

static uint8_t pattern[PATTERN_BYTES];
static long all_jobs, whole_jobs;

static uint64_t *column(uint32_t count)
{
    uint64_t *numbers = calloc(count ? count : 1, sizeof *numbers);
    CHECK(numbers, "no memory");
    return numbers;
}

/* The blocks of a message follow from its number, for its SEND and its RECEIVE alike. */
static struct task *make_task(uint32_t kind, uint64_t number, uint32_t flags, struct link *link)
{
    uint64_t state = number * 2 + 1;
    for (int i = 0; i < 5; i++)
        draw(&state);
    struct task *task = calloc(1, sizeof *task);
    CHECK(task, "no memory");
    struct kvf_lane_job *job = &task->job;
    task->link = link;
    job->kind = kind;
    job->flags = flags;
    job->request = number;
    job->count = (uint32_t)below(&state, below(&state, 4) ? 6 : MOST_BLOCKS);
    uint64_t *addresses = column(job->count), *lengths = column(job->count), *seeds = column(job->count), all = 0;
    job->announced = column(job->count);
    job->done = column(job->count);
    job->digests = column(job->count);
    job->errors = (int32_t *)column(job->count);
    for (uint32_t i = 0; i < job->count; i++) {
        lengths[i] = job->count > 6 ? below(&state, 20000) : random_length(&state);
        seeds[i] = draw(&state);
        job->errors[i] = -1; /* a result must overwrite it */
        task->begins[i] = all;
        all += lengths[i];
    }
    CHECK(all <= PATTERN_BYTES, "%lu bytes", (unsigned long)all);
    task->memory = malloc(all ? all : 1);
    CHECK(task->memory, "no memory");
    if (kind == KVF_SEND)
        memcpy(task->memory, pattern, all);
    for (uint32_t i = 0; i < job->count; i++) {
        bool discards = kind == KVF_RECEIVE && below(&state, 8) == 0;
        addresses[i] = discards ? 0 : (uintptr_t)(task->memory + task->begins[i]);
        if (kind == KVF_SEND)
            job->announced[i] = kvf_xxh3(pattern + task->begins[i], lengths[i], seeds[i]);
    }
    job->addresses = addresses;
    job->lengths = lengths;
    job->seeds = seeds;
    return task;
}

static void free_task(struct task *task)
{
    struct kvf_lane_job *job = &task->job;
    void *all[] = {(void *)job->addresses, (void *)job->lengths, (void *)job->seeds, job->announced, job->done,
                   job->digests, job->errors, task->memory, task};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
    round_.ended++;
}

static void check_task(const struct task *task)
{
    const struct kvf_lane_job *job = &task->job;
    bool failed = false;
    for (uint32_t i = 0; i < job->count; i++) {
        int32_t error = job->errors[i];
        if (error) {
            failed = true;
            CHECK(error == ECANCELED || error == ECONNRESET || error == EPIPE || error == EPROTO, "%d", error);
            CHECK(task->link->breaks, "error %d on a lane that was not closed", error);
            continue;
        }
        CHECK(!failed, "block %u passed after one that did not", i);
        CHECK(job->done[i] == job->lengths[i], "%lu", (unsigned long)job->done[i]);
        const uint8_t *bytes = pattern + task->begins[i];
        uint64_t digest = kvf_xxh3(bytes, job->lengths[i], job->seeds[i]);
        CHECK(job->announced[i] == digest, "trailer");
        if (job->addresses[i]) {
            CHECK(!memcmp(task->memory + task->begins[i], bytes, job->lengths[i]), "bytes");
            CHECK(!(job->flags & KVF_HASH) || job->digests[i] == digest, "digest");
        }
    }
    whole_jobs += !failed;
}

/* NULL: blocks are not encrypted. */
static struct kvf_tls_context *server_context, *client_context;
static uint8_t wrong_pin[KVF_PIN], *pin; /* of the certificate */

/* A client that expects another certificate. */
static void refuse_hands(void)
{
    int files[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, files) == 0, "socketpair");
    struct kvf_tls *refused[2] = {kvf_tls_new(server_context, files[0], NULL),
                                  kvf_tls_new(client_context, files[1], wrong_pin)};
    int error = -EAGAIN;
    while (error == -EAGAIN) {
        error = kvf_tls_handshake(refused[1]);
        kvf_tls_handshake(refused[0]);
    }
    CHECK(error == -EKEYREJECTED, "%d", error);
    CHECK(kvf_tls_handshake(refused[1]) == -EKEYREJECTED, "it is accepted later");
    for (int i = 0; i < 2; i++)
        kvf_tls_free(refused[i]), close(files[i]);
}

/* TLS on both ends of a connection. */
static void shake_hands(const int *files, struct kvf_tls **ends)
{
    ends[0] = kvf_tls_new(server_context, files[0], NULL);
    ends[1] = kvf_tls_new(client_context, files[1], pin);
    int errors[2] = {-EAGAIN, -EAGAIN};
    for (int i = 1; errors[0] == -EAGAIN || errors[1] == -EAGAIN; i = 1 - i)
        errors[i] = kvf_tls_handshake(ends[i]);
    CHECK(!errors[0] && !errors[1], "%d and %d", errors[0], errors[1]);
}

static void open_link(struct link *link)
{
    int files[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, files) == 0, "socketpair");
    struct kvf_tls *ends[2] = {NULL, NULL};
    if (server_context)
        shake_hands(files, ends);
    for (int i = 0; i < 2; i++) {
        int64_t lane = kvf_lanes_open(round_.lanes, files[i], ends[i]);
        CHECK(lane > 0, "%ld", (long)lane);
        link->ends[i] = (struct kvf_lane *)(intptr_t)lane;
    }
}

static void submit(uint32_t kind, uint64_t number, uint32_t flags, struct link *link, int end)
{
    uint32_t place = 0;
    while (place < MOST_TASKS && round_.tasks[place])
        place++;
    if (place == MOST_TASKS || !link->ends[end]) {
        link->breaks = true; /* the other end's job has no partner */
        return;
    }
    struct task *task = make_task(kind, number, flags, link);
    round_.submitted++;
    int64_t entry = kvf_lanes_submit(round_.lanes, link->ends[end], &task->job);
    if (entry == -ENOTCONN) {
        CHECK(link->breaks, "a lane is broken that was not closed");
        free_task(task);
        return;
    }
    CHECK(entry > 0, "%ld", (long)entry);
    task->entry = (struct kvf_entry *)(intptr_t)entry;
    round_.tasks[place] = task;
}

static void abandon(uint32_t place)
{
    struct task *task = round_.tasks[place];
    if (!task)
        return;
    if (task->job.kind == KVF_SEND)
        task->link->breaks = true;
    kvf_lanes_abandon(round_.lanes, task->entry);
    round_.tasks[place] = NULL;
    free_task(task);
}

static void reap_some(uint32_t most)
{
    void *ended[8];
    int32_t errors[8];
    uint32_t count = kvf_lanes_reap(round_.lanes, ended, errors, most);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t place = 0;
        if (errors[i] < 0) {
            while (place < MOST_TASKS && (!round_.tasks[place] || round_.tasks[place]->entry != ended[i]))
                place++;
            CHECK(place < MOST_TASKS, "an unknown job was reaped");
            check_task(round_.tasks[place]);
            free_task(round_.tasks[place]);
            round_.tasks[place] = NULL;
        } else {
            while (place < 2 * round_.num_links && round_.links[place / 2].ends[place % 2] != ended[i])
                place++;
            CHECK(place < 2 * round_.num_links, "an unknown lane was reported");
            CHECK(round_.links[place / 2].breaks, "a lane broke with %d", errors[i]);
            round_.links[place / 2].ends[place % 2] = NULL;
        }
    }
}

static void close_end(struct link *link, int end)
{
    link->breaks = true;
    if (link->ends[end])
        kvf_lanes_close_lane(round_.lanes, link->ends[end]);
    link->ends[end] = NULL;
    if (round_.num_links == MOST_LINKS)
        return;
    /* The old link keeps its tasks' `link`; its place is taken by moving it behind the others. */
    struct link *moved = &round_.links[round_.num_links++];
    *moved = *link;
    for (int i = 0; i < MOST_TASKS; i++)
        if (round_.tasks[i] && round_.tasks[i]->link == link)
            round_.tasks[i]->link = moved;
    *link = (struct link){0};
    open_link(link);
}

static void step(uint64_t *state)
{
    struct link *link = &round_.links[below(state, LINKS)];
    int end = (int)below(state, 2);
    switch (below(state, 24)) {
    case 0:
        close_end(link, end);
        break;
    case 1: case 2:
        abandon((uint32_t)below(state, MOST_TASKS));
        break;
    case 3: /* the peer expects another message */
        link->breaks = true;
        submit(KVF_RECEIVE, draw(state), KVF_HASH, link, end);
        break;
    case 4: case 5: case 6: case 7: case 8: case 9: case 10: case 11: case 12: case 13: {
        reap_some(1 + (uint32_t)below(state, 8));
        break;
    }
    default: {
        uint64_t number = draw(state);
        bool sends_first = below(state, 2);
        for (int i = 0; i < 2; i++) {
            bool sends = (i == 0) == sends_first;
            submit(sends ? KVF_SEND : KVF_RECEIVE, number, (uint32_t)below(state, 2) * KVF_HASH, link,
                   sends ? end : 1 - end);
        }
    }
    }
}

static void *run_thread(void *seed)
{
    uint64_t state = (uintptr_t)seed;
    for (bool ends = false; !ends;) {
        struct pollfd ready = {.fd = kvf_lanes_descriptor(round_.lanes), .events = POLLIN};
        if (below(&state, 4) == 0)
            poll(&ready, 1, 1);
        pthread_mutex_lock(&round_.lock);
        step(&state);
        ends = round_.ends;
        pthread_mutex_unlock(&round_.lock);
    }
    return NULL;
}

static void run_round(uint64_t *state)
{
    round_.lanes = kvf_lanes_new(1 + (uint32_t)below(state, 3));
    round_.links = calloc(MOST_LINKS, sizeof *round_.links);
    CHECK(round_.lanes && round_.links, "no lanes");
    round_.ends = false;
    round_.submitted = round_.ended = 0;
    round_.num_links = LINKS;
    for (int i = 0; i < LINKS; i++)
        open_link(&round_.links[i]);
    pthread_t threads[CALLERS];
    for (int i = 0; i < CALLERS; i++)
        CHECK(pthread_create(&threads[i], NULL, run_thread, (void *)(uintptr_t)(draw(state) | 1)) == 0, "no thread");
    struct timespec pause = {.tv_nsec = (long)below(state, 100000000)};
    nanosleep(&pause, NULL);
    pthread_mutex_lock(&round_.lock);
    round_.ends = true;
    pthread_mutex_unlock(&round_.lock);
    for (int i = 0; i < CALLERS; i++)
        pthread_join(threads[i], NULL);
    for (uint32_t i = 0; i < round_.num_links; i++)
        round_.links[i].breaks = true;
    kvf_lanes_free(round_.lanes);
    for (int i = 0; i < MOST_TASKS; i++)
        if (round_.tasks[i]) {
            check_task(round_.tasks[i]);
            free_task(round_.tasks[i]);
            round_.tasks[i] = NULL;
        }
    CHECK(round_.submitted == round_.ended, "%ld of %ld jobs", round_.ended, round_.submitted);
    all_jobs += round_.submitted;
    free(round_.links);
}

static uint64_t read_file(const char *path, uint8_t *memory, size_t most)
{
    FILE *file = fopen(path, "rb");
    CHECK(file, "%s", path);
    size_t size = fread(memory, 1, most, file);
    fclose(file);
    return size;
}

/* Of a certificate and a private key, both DER, and the SHA-256 of the certificate. */
static void use_tls(char **paths)
{
    static uint8_t certificate[4096], key[4096], digest[KVF_PIN];
    CHECK(!kvf_tls_why_none(), "%s", kvf_tls_why_none());
    uint64_t certificate_size = read_file(paths[0], certificate, sizeof certificate);
    uint64_t key_size = read_file(paths[1], key, sizeof key);
    CHECK(read_file(paths[2], digest, sizeof digest) == KVF_PIN, "%s", paths[2]);
    pin = digest;
    CHECK(!kvf_tls_context_new(certificate, certificate_size - 1, key, key_size), "a certificate that is cut off");
    CHECK(!kvf_tls_context_new(certificate, certificate_size, key, key_size - 1), "a key that is cut off");
    server_context = kvf_tls_context_new(certificate, certificate_size, key, key_size);
    client_context = kvf_tls_context_new(NULL, 0, NULL, 0);
    CHECK(server_context && client_context, "no context");
    refuse_hands();
}

int main(int count, char **arguments)
{
    CHECK(count == 3 || count == 6, "SECONDS SEED [CERTIFICATE KEY DIGEST]");
    if (count == 6)
        use_tls(arguments + 3);
    uint64_t state = begin(arguments, pattern, PATTERN_BYTES);
    long rounds = 0;
    do {
        run_round(&state);
        rounds++;
    } while (goes_on());
    if (server_context) {
        kvf_tls_context_free(server_context);
        kvf_tls_context_free(client_context);
    }
    printf("%ld jobs, %ld of them whole, in %ld rounds\n", all_jobs, whole_jobs, rounds);
    return 0;
}
