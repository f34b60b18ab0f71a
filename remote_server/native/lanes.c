/* The calls of lanes, and the completion of their jobs. */

#define _GNU_SOURCE

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include "lane.h"

enum { MAX_THREADS = 1024 };

/* All below, up to the calls, are called with the lock. */

static void add_completed(struct kvf_lanes *lanes, struct node *node)
{
    if (!lanes->completed.first)
        ring(lanes->descriptor);
    append(&lanes->completed, node);
}

static void remove_completed(struct kvf_lanes *lanes, struct node *node)
{
    unlink_node(&lanes->completed, node);
    if (!lanes->completed.first)
        silence(lanes->descriptor);
}

static struct list *queue_of(struct kvf_lane *lane, const struct kvf_entry *entry)
{
    return &lane->queues[entry->job->kind == KVF_SEND ? SENDS : RECEIVES];
}

/* From here on the job is its owner's; the entry alone is in the list. */
static void complete(struct kvf_lanes *lanes, struct kvf_entry *entry)
{
    unlink_node(queue_of(entry->lane, entry), &entry->node);
    entry->lane = NULL;
    if (entry->is_abandoned) {
        free(entry->job);
        free(entry);
        return;
    }
    entry->job = NULL;
    add_completed(lanes, &entry->node);
}

void kvf_complete_whole(struct kvf_lanes *lanes, struct kvf_lane *lane, int direction)
{
    struct kvf_passage *passage = &lane->passages[direction];
    for (struct kvf_entry *entry; (entry = first_of(lane, direction)) && passage->index == entry->job->count;) {
        complete(lanes, entry);
        passage->index = passage->hashes = 0; /* at a job's end nothing of a block has passed */
    }
}

void kvf_end_lane(struct kvf_lanes *lanes, struct kvf_lane *lane, int32_t error)
{
    epoll_ctl(lane->worker->epoll, EPOLL_CTL_DEL, lane->connection, NULL); /* a child of fork may have it open */
    shutdown(lane->connection, SHUT_RDWR);                                  /* for the same reason */
    close(lane->connection);
    lane->connection = -1;
    kvf_tls_free(lane->tls);
    lane->tls = NULL;
    if (lane->is_ready)
        unlink_node(&lane->worker->ready, &lane->of_ready);
    lane->is_ready = false;
    lane->error = error;
    for (int direction = 0; direction < DIRECTIONS; direction++) {
        struct kvf_passage *passage = &lane->passages[direction];
        for (struct kvf_entry *entry; (entry = first_of(lane, direction));) {
            if (lane->error == 0)
                lane->error = ECONNRESET; /* the peer closed it while there were jobs */
            if (!entry->is_abandoned)
                kvf_end_passage(passage, entry->job, lane->error);
            complete(lanes, entry);
            passage->index = 0;
            passage->passed = 0;
        }
    }
    add_completed(lanes, &lane->node);
}

/* Nothing uses the lane's address any more but events that its thread may have. */
static void release(struct kvf_lane *lane)
{
    struct worker *worker = lane->worker;
    unlink_node(&worker->open, &lane->of_worker);
    append(&worker->released, &lane->of_worker);
    worker->load--;
    ring(worker->wake);
}

/* Waits until the lane is not busy. It stays so until the caller gives up the lock. */
static void wait_for(struct kvf_lanes *lanes, struct kvf_lane *lane)
{
    lane->is_wanted = true;
    while (lane->is_busy)
        pthread_cond_wait(&lanes->changed, &lanes->lock);
    lane->is_wanted = false;
    pthread_cond_broadcast(&lanes->changed);
}

/* The calls. */

struct kvf_lanes *kvf_lanes_new(uint32_t threads)
{
    if (!threads || threads > MAX_THREADS)
        return NULL;
    struct kvf_lanes *lanes = calloc(1, sizeof *lanes + threads * sizeof lanes->workers[0]);
    if (!lanes)
        return NULL;
    lanes->descriptor = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (lanes->descriptor < 0) {
        free(lanes);
        return NULL;
    }
    pthread_mutex_init(&lanes->lock, NULL);
    pthread_cond_init(&lanes->changed, NULL);
    lanes->num_workers = threads;
    for (uint32_t i = 0; i < threads; i++) {
        lanes->workers[i].lanes = lanes;
        lanes->workers[i].epoll = lanes->workers[i].wake = -1;
    }
    return lanes;
}

int kvf_lanes_descriptor(struct kvf_lanes *lanes)
{
    return lanes->descriptor;
}

int64_t kvf_lanes_open(struct kvf_lanes *lanes, int connection, struct kvf_tls *tls)
{
    struct kvf_lane *lane = calloc(1, sizeof *lane);
    if (!lane)
        return -ENOMEM;
    pthread_mutex_lock(&lanes->lock);
    struct worker *worker = &lanes->workers[0];
    for (uint32_t i = 1; i < lanes->num_workers; i++)
        if (lanes->workers[i].load < worker->load)
            worker = &lanes->workers[i];
    struct epoll_event event = {.events = EPOLLRDHUP, .data.ptr = lane};
    int error = kvf_start_worker(worker);
    lane->node.is_lane = true;
    lane->worker = worker;
    lane->connection = connection;
    lane->tls = tls;
    lane->watched = EPOLLRDHUP;
    if (!error && epoll_ctl(worker->epoll, EPOLL_CTL_ADD, connection, &event) < 0)
        error = errno;
    if (!error) {
        int yes = 1;
        setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
        append(&worker->open, &lane->of_worker);
        worker->load++;
    }
    pthread_mutex_unlock(&lanes->lock);
    if (error)
        free(lane);
    return error ? -error : (int64_t)(intptr_t)lane;
}

int64_t kvf_lanes_submit(struct kvf_lanes *lanes, struct kvf_lane *lane, struct kvf_lane_job *job)
{
    if (job->kind != KVF_SEND && job->kind != KVF_RECEIVE)
        return -EINVAL;
    struct kvf_entry *entry = calloc(1, sizeof *entry);
    if (!entry)
        return -ENOMEM;
    pthread_mutex_lock(&lanes->lock);
    bool is_open = lane->connection >= 0;
    if (is_open) {
        entry->lane = lane;
        entry->job = job;
        struct list *queue = queue_of(lane, entry);
        append(queue, &entry->node);
        if (queue->first == &entry->node)
            kvf_complete_whole(lanes, lane, job->kind == KVF_SEND ? SENDS : RECEIVES);
        kvf_watch(lane);
    }
    pthread_mutex_unlock(&lanes->lock);
    if (!is_open)
        free(entry);
    return is_open ? (int64_t)(intptr_t)entry : -ENOTCONN;
}

/* A job that discards the blocks of `job`, in one piece of memory. NULL: there is none. */
static struct kvf_lane_job *discard_of(const struct kvf_lane_job *job)
{
    struct kvf_lane_job *discard = calloc(1, sizeof *discard + 2 * sizeof(uint64_t) * job->count);
    if (!discard)
        return NULL;
    uint64_t *addresses = (uint64_t *)(discard + 1), *lengths = addresses + job->count;
    memcpy(lengths, job->lengths, sizeof *lengths * job->count);
    *discard = (struct kvf_lane_job){.kind = KVF_RECEIVE, .count = job->count, .request = job->request,
                                     .addresses = addresses, .lengths = lengths};
    return discard;
}

void kvf_lanes_abandon(struct kvf_lanes *lanes, struct kvf_entry *entry)
{
    pthread_mutex_lock(&lanes->lock);
    if (entry->lane)
        wait_for(lanes, entry->lane); /* the job may complete meanwhile */
    struct kvf_lane_job *discard = NULL;
    bool receives = entry->lane && entry->job->kind == KVF_RECEIVE;
    if (receives)
        discard = discard_of(entry->job);
    if (discard) {
        entry->job = discard;
        entry->is_abandoned = true;
    } else {
        if (entry->lane)
            kvf_end_lane(lanes, entry->lane, receives ? ENOMEM : ECANCELED);
        remove_completed(lanes, &entry->node);
        free(entry);
    }
    pthread_mutex_unlock(&lanes->lock);
}

/* Ends a lane that is not ended, without a report. */
static void close_lane(struct kvf_lanes *lanes, struct kvf_lane *lane)
{
    wait_for(lanes, lane);
    if (lane->connection >= 0)
        kvf_end_lane(lanes, lane, ECANCELED);
    remove_completed(lanes, &lane->node);
    release(lane);
}

void kvf_lanes_close_lane(struct kvf_lanes *lanes, struct kvf_lane *lane)
{
    pthread_mutex_lock(&lanes->lock);
    close_lane(lanes, lane);
    pthread_mutex_unlock(&lanes->lock);
}

uint32_t kvf_lanes_reap(struct kvf_lanes *lanes, void **ended, int32_t *errors, uint32_t most)
{
    uint32_t count = 0;
    pthread_mutex_lock(&lanes->lock);
    for (struct node *node; count < most && (node = lanes->completed.first); count++) {
        remove_completed(lanes, node);
        ended[count] = node;
        if (node->is_lane) {
            errors[count] = ((struct kvf_lane *)node)->error;
            release((struct kvf_lane *)node);
        } else {
            errors[count] = -1;
            free(node);
        }
    }
    pthread_mutex_unlock(&lanes->lock);
    return count;
}

void kvf_lanes_free(struct kvf_lanes *lanes)
{
    pthread_mutex_lock(&lanes->lock);
    lanes->stopping = true;
    for (uint32_t i = 0; i < lanes->num_workers; i++) {
        struct worker *worker = &lanes->workers[i];
        while (worker->open.first)
            close_lane(lanes, KVF_LANE_OF(worker->open.first, of_worker));
        if (worker->epoll >= 0)
            ring(worker->wake);
    }
    pthread_mutex_unlock(&lanes->lock);
    for (uint32_t i = 0; i < lanes->num_workers; i++)
        kvf_join_worker(&lanes->workers[i]);
    for (struct node *node; (node = lanes->completed.first);) {
        unlink_node(&lanes->completed, node);
        free(node);
    }
    pthread_cond_destroy(&lanes->changed);
    pthread_mutex_destroy(&lanes->lock);
    close(lanes->descriptor);
    free(lanes);
}
