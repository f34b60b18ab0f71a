/* A connection in TLS and its buffers, inside the library. */

#ifndef KVF_TLS_CONNECTION_H
#define KVF_TLS_CONNECTION_H

#include "tls_keys.h"
#include "tls_records.h"

enum {
    INPUT_BYTES = 128 << 10, /* of one system call */
    /* A send of KVF_TLS_MOST with its records' own bytes, and a KeyUpdate before it. */
    OUTPUT_BYTES = KVF_TLS_MOST + (4 << 10),
};

struct kvf_tls {
    SSL *ssl; /* of the handshake; nothing uses it afterwards */
    int connection;
    bool is_server, is_closed; /* is_closed: the peer has closed the connection */
    bool owes_update;          /* other keys before the next record that is sent */
    int error;                 /* an errno; nothing follows it */
    uint32_t idle;             /* records in a row that had no bytes */
    uint32_t input_begin, input_end, output_begin, output_end, accepted; /* accepted: bytes sent, not reported yet */
    size_t opened, opened_end; /* bytes in `input`, before input_begin, of a record that is open there */
    uint8_t pin[KVF_PIN];
    uint8_t secrets[2][KVF_TRAFFIC_SECRET]; /* of the client, and of the server, from the handshake until its end */
    struct kvf_keys sends, receives;
    uint8_t input[INPUT_BYTES], output[OUTPUT_BYTES]; /* records */
};

/* Adds what has come to the input: 0, EAGAIN, or another errno that is kept. ECONNRESET, and is_closed is true: nothing
 * comes any more. */
KVF_HIDDEN int kvf_tls_fill(struct kvf_tls *tls);

/* Sends the records that are formed: 0 or an errno. */
KVF_HIDDEN int kvf_tls_flush(struct kvf_tls *tls);

#endif
