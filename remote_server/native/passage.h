/* The passage of a job's blocks through a connection, inside the library. */

#ifndef KVF_PASSAGE_H
#define KVF_PASSAGE_H

#include "bytes.h"
#include "lanes.h"
#include "tls_socket.h"

enum { KVF_GATHERED = 32 }; /* blocks in one system call, at most */

/* The place that a lane has reached in its first job of a kind. All zero: at the beginning. It points to nothing. */
struct kvf_passage {
    uint64_t passed; /* bytes of the present block that have passed, with its header and trailer */
    uint32_t index;  /* the present block */
    uint32_t hashes; /* the block in `hash`, counted from 1; 0: none yet */
    uint64_t hashed; /* bytes of it in `hash` */
    struct kvf_hash hash;
    struct {
        uint8_t header[KVF_HEADER], trailer[KVF_TRAILER];
    } frames[KVF_GATHERED]; /* of the present block and those after it, by their index modulo KVF_GATHERED */
};

enum { KVF_CLOSED = -1 };

/* Moves at most a piece of the job that is not at its end, in one system call or a few of TLS (`tls` may be NULL), and
 * writes the outputs of the blocks that are whole then. `sink` has room for a piece: discarded bytes are written there.
 *
 * 0: as much as was asked for has moved; EAGAIN: less, the connection has or takes no more now; KVF_CLOSED: the peer has
 * closed it; EPROTO: another header came, or bytes that are no TLS; or an errno of the system call. */
KVF_HIDDEN int kvf_pass(struct kvf_passage *passage, struct kvf_lane_job *job, int connection, struct kvf_tls *tls,
                        uint8_t *sink);

/* The outputs of the blocks that have not passed whole. */
KVF_HIDDEN void kvf_end_passage(const struct kvf_passage *passage, struct kvf_lane_job *job, int32_t error);

#endif
