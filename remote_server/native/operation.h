/* Operations of a job, inside the library. */

#ifndef KVF_OPERATION_H
#define KVF_OPERATION_H

#include <stdatomic.h>

#include "mover.h"

#define KVF_HIDDEN __attribute__((visibility("hidden")))

/* Does those from `begin` to before `end` on the calling thread and writes their outputs. `cancelled` may be NULL. */
KVF_HIDDEN void kvf_operations(struct kvf_job *job, uint32_t begin, uint32_t end, const atomic_bool *cancelled);

/* Installs the handler of SIGBUS, once a process. */
KVF_HIDDEN void kvf_catch_bus_errors(void);

#endif
