/* What both kinds of threads use, those of jobs and those of lanes: lists, bells, the start of a thread. */

#ifndef KVF_THREADS_H
#define KVF_THREADS_H

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

/* First in what it links, and in one list at most. */
struct node {
    struct node *before, *after;
    bool is_lane; /* where a list has lanes and jobs */
};

struct list {
    struct node *first, *last;
};

static inline void append(struct list *list, struct node *node)
{
    node->before = list->last;
    node->after = NULL;
    *(list->last ? &list->last->after : &list->first) = node;
    list->last = node;
}

static inline void unlink_node(struct list *list, struct node *node)
{
    *(node->before ? &node->before->after : &list->first) = node->after;
    *(node->after ? &node->after->before : &list->last) = node->before;
}

/* An eventfd becomes readable. */
static inline void ring(int descriptor)
{
    uint64_t one = 1;
    while (write(descriptor, &one, sizeof one) < 0 && errno == EINTR) {
    }
}

/* And is readable no more. */
static inline void silence(int descriptor)
{
    uint64_t rung;
    while (read(descriptor, &rung, sizeof rung) < 0 && errno == EINTR) {
    }
}

/* Starts a thread that takes no signal but those of its own faults, which a handler may report. 0 or an errno. */
static inline int start_thread(pthread_t *thread, void *(*work)(void *), void *argument)
{
    sigset_t mask, before;
    sigfillset(&mask);
    sigdelset(&mask, SIGBUS);
    sigdelset(&mask, SIGSEGV);
    sigdelset(&mask, SIGILL);
    sigdelset(&mask, SIGFPE);
    pthread_sigmask(SIG_SETMASK, &mask, &before);
    int error = pthread_create(thread, NULL, work, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

#endif
