/* Lanes: blocks between memory and TCP connections, on threads of their own. */

#ifndef KVF_LANES_H
#define KVF_LANES_H

#include <stdint.h>

enum { KVF_SEND = 3, KVF_RECEIVE = 4 }; /* after the mover's kinds; KVF_HASH of mover.h is the only flag */

enum { KVF_HEADER = 16, KVF_TRAILER = 8 }; /* u64 request, u32 position, u32 length; the checksum. Little-endian. */

/* The blocks of one message. Their positions are 0 to count - 1.
 *
 * Ownership. All memory of a job, its struct, its columns and the bytes that they name, belongs to the lanes from
 * kvf_lanes_submit until kvf_lanes_reap returns its entry, or kvf_lanes_abandon or kvf_lanes_free returns. After
 * kvf_lanes_close_lane only the struct and the columns are the lanes', until then. */
struct kvf_lane_job {
    uint32_t kind, flags, count, unused;
    uint64_t request;
    const uint64_t *addresses; /* RECEIVE: 0 discards the block */
    const uint64_t *lengths;   /* each below 4 GiB */
    const uint64_t *seeds;     /* with HASH */
    uint64_t *announced;       /* SEND without HASH: the trailers; RECEIVE: out, the trailers that came */
    uint64_t *done;            /* out: bytes that were received, or handed to the system; they grow */
    uint64_t *digests;         /* out, with HASH; meaningful where errors[i] == 0. SEND: they are the trailers */
    int32_t *errors;           /* out: 0 or the errno that ended the block's lane */
};

struct kvf_lanes;
struct kvf_lane;
struct kvf_entry; /* a submitted job */
struct kvf_tls;   /* of tls.h */

/* One call at a time for one `struct kvf_lanes`: the caller has a lock. They belong to the process that made them: in a
 * child of fork no call may be made. NULL: no memory, no descriptors, or a number of threads that is 0 or too large. */
struct kvf_lanes *kvf_lanes_new(uint32_t threads);

/* An eventfd, readable exactly while kvf_lanes_reap has something to return. */
int kvf_lanes_descriptor(struct kvf_lanes *lanes);

/* Takes the connected socket over and closes it in the end, and with it `tls`, whose handshake is complete; NULL: the
 * blocks are not encrypted. Returns the lane's address, or -errno: then both are the caller's. The address is valid until
 * the lane is closed or reported as broken. */
int64_t kvf_lanes_open(struct kvf_lanes *lanes, int connection, struct kvf_tls *tls);

/* Returns the entry's address, which is valid until the job is reaped or abandoned. -ENOTCONN: the lane is broken;
 * -EINVAL: an unknown kind; -ENOMEM. After an error the job is the caller's. */
int64_t kvf_lanes_submit(struct kvf_lanes *lanes, struct kvf_lane *lane, struct kvf_lane_job *job);

/* Waits for the present piece of the job's lane, then touches nothing of the job. A RECEIVE is discarded as it comes. A
 * SEND that has not been sent whole breaks its lane with ECANCELED. */
void kvf_lanes_abandon(struct kvf_lanes *lanes, struct kvf_entry *entry);

/* Waits for the present piece, closes the connection and completes the jobs with ECANCELED. */
void kvf_lanes_close_lane(struct kvf_lanes *lanes, struct kvf_lane *lane);

/* At most `most` completed jobs (an entry, with -1 in `errors`) and broken lanes (with an errno, or 0 when the peer
 * closed a lane without jobs), oldest first. Each is returned once, a lane after all its jobs. */
uint32_t kvf_lanes_reap(struct kvf_lanes *lanes, void **ended, int32_t *errors, uint32_t most);

/* Closes all lanes, joins the threads. Jobs not reaped are the caller's when it returns. No call may follow. */
void kvf_lanes_free(struct kvf_lanes *lanes);

#endif
