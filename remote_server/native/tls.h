/* TLS 1.3 on a connection, by OpenSSL 3, which is loaded when it is first needed. */

#ifndef KVF_TLS_H
#define KVF_TLS_H

#include <stdint.h>

enum { KVF_PIN = 32 }; /* bytes of a SHA-256 */

struct kvf_tls_context;
struct kvf_tls;

/* Loads libssl.so.3, once. NULL: it is here; else why it is not, in static memory. */
const char *kvf_tls_why_none(void);

/* Of servers, with a certificate and its private key (PKCS 8), both DER; of clients with neither (NULL, 0). NULL: they
 * are no pair, this OpenSSL has no TLS 1.3, or kvf_tls_why_none has a reason. */
struct kvf_tls_context *kvf_tls_context_new(const uint8_t *certificate, uint64_t certificate_size, const uint8_t *key,
                                            uint64_t key_size);

void kvf_tls_context_free(struct kvf_tls_context *context);

/* TLS on `connection`, which stays the caller's. The pin of a client is the SHA-256 of the one certificate that it
 * accepts. The context may be freed before it. NULL: no memory.
 *
 * One thread at a time uses it. No call waits for the peer. */
struct kvf_tls *kvf_tls_new(struct kvf_tls_context *context, int connection, const uint8_t *pin);

/* 0: it is complete, and the certificate of the server is the pinned one. -EAGAIN: call again when the connection is
 * readable. -EKEYREJECTED: another certificate. -EPROTO: no TLS 1.3. -ECONNRESET: the peer closed the connection. After
 * an error nothing may be sent. */
int kvf_tls_handshake(struct kvf_tls *tls);

/* After the handshake: the bytes that have come, at most `size`, or that were sent, which are all; 0: the peer has
 * closed the connection; or -errno. -EAGAIN of a send: call again with the same bytes, or more after them. */
int64_t kvf_tls_read(struct kvf_tls *tls, uint8_t *memory, uint64_t size);
int64_t kvf_tls_write(struct kvf_tls *tls, const uint8_t *memory, uint64_t size);

void kvf_tls_free(struct kvf_tls *tls);

#endif
