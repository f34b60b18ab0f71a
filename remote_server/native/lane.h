/* The state of lanes and their threads, inside the library.
 *
 * One lock guards all but the bytes. A thread marks a lane as busy, moves a piece of its first job without the lock, and
 * accounts for it with the lock. A caller who wants to take memory back waits until the lane is not busy; the thread
 * then lets it go first. A lane is freed by its thread only, between two waits, because the events of a wait name it. */

#ifndef KVF_LANE_H
#define KVF_LANE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

#include "passage.h"
#include "threads.h"

struct kvf_entry {
    struct node node;         /* in its lane's queue, then in `completed`; first */
    struct kvf_lane *lane;    /* NULL: completed */
    struct kvf_lane_job *job; /* not touched once the entry is completed */
    bool is_abandoned;        /* `job` is memory of the entry's own */
};

enum { RECEIVES, SENDS, DIRECTIONS };

struct kvf_lane {
    struct node node;                        /* in `completed` once it is broken; first */
    struct node of_worker;
    struct node of_ready;
    struct worker *worker;
    int connection;                          /* -1: closed */
    struct kvf_tls *tls;                     /* NULL: there is none, or it is closed */
    int32_t error;                           /* that broke it */
    uint32_t watched;                        /* the events that epoll has */
    bool is_busy;                            /* its thread moves a piece without the lock */
    bool is_wanted;                          /* a caller waits until it is not busy */
    bool is_ready;                           /* its `tls` has bytes for a RECEIVE, which epoll does not see */
    struct list queues[DIRECTIONS];
    struct kvf_passage passages[DIRECTIONS]; /* through the first job of each queue */
};

struct worker {
    struct kvf_lanes *lanes;
    pthread_t thread;
    int epoll, wake;            /* -1: the thread is not started */
    uint32_t load;              /* lanes that it has */
    struct list open, released; /* lanes; released ones are freed when no event can name them */
    struct list ready;          /* lanes that are served without an event; it rings `wake` */
    uint8_t *sink;
};

struct kvf_lanes {
    pthread_mutex_t lock;
    pthread_cond_t changed;  /* is_busy or is_wanted of a lane */
    int descriptor;
    bool stopping;
    struct list completed;   /* entries and lanes, to be reaped */
    uint32_t num_workers;
    struct worker workers[];
};

#define KVF_LANE_OF(node, list) ((struct kvf_lane *)((char *)(node) - offsetof(struct kvf_lane, list)))

/* All below are called with the lock. */

static inline struct kvf_entry *first_of(const struct kvf_lane *lane, int direction)
{
    return (struct kvf_entry *)lane->queues[direction].first;
}

/* Completes the jobs at the head of a queue that are at their end. */
KVF_HIDDEN void kvf_complete_whole(struct kvf_lanes *lanes, struct kvf_lane *lane, int direction);

/* Closes the connection of a lane that is not busy, completes its jobs, then the lane itself. */
KVF_HIDDEN void kvf_end_lane(struct kvf_lanes *lanes, struct kvf_lane *lane, int32_t error);

/* Has epoll wait for what the lane's jobs need. It also wakes the thread, if there is something for them already. */
KVF_HIDDEN void kvf_watch(struct kvf_lane *lane);

/* Starts the thread if it is not running. 0 or an errno. */
KVF_HIDDEN int kvf_start_worker(struct worker *worker);

/* Without the lock: waits for the end of the thread, which `stopping` has ended. */
KVF_HIDDEN void kvf_join_worker(struct worker *worker);

#endif
