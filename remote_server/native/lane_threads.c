/* The threads of lanes: each waits for its connections with epoll and moves pieces in turns. */

#define _GNU_SOURCE

#include <sched.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include "lane.h"
#include "mover.h"

enum {
    /* They have two thirds of the weight of other threads: the loop that gives them work also serves small requests.
     * With two cores a lookup beside four streams takes three quarters of the time (2.6 for 3.6 ms, slowest tenth 8.3
     * for 11.4), and the streams move as much. */
    NICER = 2,
    TURN_PIECES = 4, /* then the next lane of the thread has its turn */
    EVENTS = 16,
    ENDS = EPOLLRDHUP | EPOLLHUP | EPOLLERR,
};

static void add_ready(struct kvf_lane *lane)
{
    /* While it is busy its thread uses `tls`, and calls kvf_watch afterwards. */
    if (!lane->tls || lane->is_ready || lane->is_busy || !first_of(lane, RECEIVES) || !kvf_tls_has_input(lane->tls))
        return;
    lane->is_ready = true;
    append(&lane->worker->ready, &lane->of_ready);
    ring(lane->worker->wake);
}

void kvf_watch(struct kvf_lane *lane)
{
    add_ready(lane);
    uint32_t events = EPOLLRDHUP | (first_of(lane, RECEIVES) ? EPOLLIN : 0) | (first_of(lane, SENDS) ? EPOLLOUT : 0);
    if (events == lane->watched)
        return;
    struct epoll_event event = {.events = events, .data.ptr = lane};
    epoll_ctl(lane->worker->epoll, EPOLL_CTL_MOD, lane->connection, &event);
    lane->watched = events;
}

/* Moves pieces of one direction. 0: the lane goes on, or was closed meanwhile; else as kvf_pass. */
static int move(struct worker *worker, struct kvf_lane *lane, int direction)
{
    struct kvf_lanes *lanes = worker->lanes;
    int error = 0;
    for (int pieces = 0; pieces < TURN_PIECES && !error; pieces++) {
        while (lane->is_wanted)
            pthread_cond_wait(&lanes->changed, &lanes->lock);
        struct kvf_entry *entry = first_of(lane, direction);
        if (!entry)
            break;
        struct kvf_lane_job *job = entry->job; /* stays: the lane is busy */
        int connection = lane->connection;
        struct kvf_tls *tls = lane->tls;
        lane->is_busy = true;
        pthread_mutex_unlock(&lanes->lock);
        error = kvf_pass(&lane->passages[direction], job, connection, tls, worker->sink);
        pthread_mutex_lock(&lanes->lock);
        lane->is_busy = false;
        if (lane->is_wanted)
            pthread_cond_broadcast(&lanes->changed);
        kvf_complete_whole(lanes, lane, direction);
    }
    return error == EAGAIN ? 0 : error;
}

static int error_of(const struct kvf_lane *lane)
{
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(lane->connection, SOL_SOCKET, SO_ERROR, &error, &size);
    return error ? error : KVF_CLOSED;
}

static void serve(struct worker *worker, struct kvf_lane *lane, uint32_t events)
{
    int error = 0;
    if (events & (EPOLLIN | ENDS))
        error = move(worker, lane, RECEIVES);
    if (!error && events & (EPOLLOUT | ENDS))
        error = move(worker, lane, SENDS);
    if (lane->connection < 0)
        return;
    if (!error && events & ENDS && !first_of(lane, RECEIVES))
        error = error_of(lane);
    if (error)
        kvf_end_lane(worker->lanes, lane, error == KVF_CLOSED ? 0 : error);
    else
        kvf_watch(lane);
}

/* Serves the lanes that are ready now, once: one that stays so comes after the events of the others. */
static void serve_ready(struct worker *worker)
{
    uint32_t left = 0;
    for (struct node *node = worker->ready.first; node; node = node->after)
        left++;
    for (struct node *node; left && (node = worker->ready.first); left--) { /* a lane may be closed meanwhile */
        struct kvf_lane *lane = KVF_LANE_OF(node, of_ready);
        unlink_node(&worker->ready, node);
        lane->is_ready = false;
        serve(worker, lane, EPOLLIN);
    }
}

static void free_released(struct worker *worker)
{
    for (struct node *node; (node = worker->released.first);) {
        unlink_node(&worker->released, node);
        free(KVF_LANE_OF(node, of_worker));
    }
}

/* A thread that wakes preempts another one, unless it is a batch thread. Lanes wake at each piece, and preempted each
 * other and their peer for a few of them at a time: with two cores, three times as many switches, and a put of 128 MiB
 * took 20.1 ms for 18.3, also beside busy neighbours 1.1 times as long. A policy that was chosen for the process
 * stays. */
static void wake_patiently(void)
{
    struct sched_param none = {0};
    if (sched_getscheduler(0) == SCHED_OTHER) /* of this thread, on Linux */
        sched_setscheduler(0, SCHED_BATCH, &none);
}

/* A thread. */
static void *work(void *argument)
{
    struct worker *worker = argument;
    struct kvf_lanes *lanes = worker->lanes;
    struct epoll_event events[EVENTS];
    pthread_setname_np(pthread_self(), "kvferry-lanes");
    setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, 0) + NICER); /* of this thread, on Linux */
    wake_patiently();
    for (bool stopping = false; !stopping;) {
        int count = epoll_wait(worker->epoll, events, EVENTS, -1);
        pthread_mutex_lock(&lanes->lock);
        for (int i = 0; i < count; i++) {
            struct kvf_lane *lane = events[i].data.ptr;
            if (!lane)
                silence(worker->wake);
            else if (lane->connection >= 0)
                serve(worker, lane, events[i].events);
        }
        serve_ready(worker);
        free_released(worker);
        stopping = lanes->stopping;
        pthread_mutex_unlock(&lanes->lock);
    }
    return NULL;
}

static void close_worker(struct worker *worker)
{
    free(worker->sink);
    close(worker->wake);
    close(worker->epoll);
    worker->epoll = worker->wake = -1;
}

int kvf_start_worker(struct worker *worker)
{
    if (worker->epoll >= 0)
        return 0;
    worker->sink = malloc(KVF_PIECE_BYTES);
    worker->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    worker->epoll = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN};
    int error = 0;
    if (!worker->sink)
        error = ENOMEM;
    else if (worker->wake < 0 || worker->epoll < 0 || epoll_ctl(worker->epoll, EPOLL_CTL_ADD, worker->wake, &event) < 0)
        error = errno;
    if (!error)
        error = start_thread(&worker->thread, work, worker);
    if (error)
        close_worker(worker);
    return error;
}

void kvf_join_worker(struct worker *worker)
{
    if (worker->epoll < 0)
        return;
    pthread_join(worker->thread, NULL);
    free_released(worker); /* after the thread's last look */
    close_worker(worker);
}
