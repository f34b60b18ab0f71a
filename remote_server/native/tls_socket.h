/* Parts of memory through TLS, inside the library. */

#ifndef KVF_TLS_SOCKET_H
#define KVF_TLS_SOCKET_H

#include <stdbool.h>
#include <sys/socket.h>

#include "bytes.h"
#include "tls.h"

/* As recvmsg and sendmsg with MSG_DONTWAIT, after the handshake. A send moves all parts or none: after EAGAIN it is
 * repeated with the same bytes, some of which may be on their way already. At most KVF_TLS_MOST bytes are sent. */
KVF_HIDDEN ssize_t kvf_tls_receive(struct kvf_tls *tls, const struct msghdr *message);
KVF_HIDDEN ssize_t kvf_tls_send(struct kvf_tls *tls, const struct msghdr *message);

enum { KVF_TLS_MOST = 136 << 10 };

/* A receive would return at once, or take what has come, though the connection may not be readable. */
KVF_HIDDEN bool kvf_tls_has_input(const struct kvf_tls *tls);

#endif
