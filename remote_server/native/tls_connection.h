/* A connection in TLS and its buffers, inside the library. */

#ifndef KVF_TLS_CONNECTION_H
#define KVF_TLS_CONNECTION_H

#include "openssl.h"
#include "tls_socket.h"

enum {
    INPUT_BYTES = 128 << 10, /* of one system call */
    /* A send of KVF_TLS_MOST with its records' own bytes, a KeyUpdate before it, and an alert. */
    OUTPUT_BYTES = KVF_TLS_MOST + (4 << 10),
};

struct kvf_tls {
    SSL *ssl;
    int connection;
    bool is_server, is_closed; /* is_closed: the peer has closed the connection, or TLS on it */
    bool is_starved;           /* OpenSSL has asked for bytes that have not come */
    int error;                 /* an errno; nothing follows it */
    uint32_t inputs;           /* system calls of this receive, or of this step of a handshake */
    uint32_t idle;             /* records in a row that had no bytes */
    uint32_t sealed;           /* records since these keys began */
    uint32_t input_begin, input_end, output_begin, output_end, accepted; /* accepted: bytes sent, not reported yet */
    uint8_t pin[KVF_PIN];
    uint8_t input[INPUT_BYTES], output[OUTPUT_BYTES]; /* records */
};

/* The BIO by which OpenSSL reads the input, which is filled from the connection, and adds to the output. NULL: no
 * memory. kvf_tls_make_buffers is called before, once; it returns whether there are any. */
KVF_HIDDEN bool kvf_tls_make_buffers(void);
KVF_HIDDEN BIO *kvf_tls_buffers(struct kvf_tls *tls);

/* Sends the records that are formed: 0 or an errno. */
KVF_HIDDEN int kvf_tls_flush(struct kvf_tls *tls);

/* The errno of a call of OpenSSL that returned `result`, which is not 1. EAGAIN: bytes are missing. */
KVF_HIDDEN int kvf_tls_error(struct kvf_tls *tls, int result);

#endif
