/* The functions of OpenSSL 3 that are used, by their documented prototypes. Its headers are not needed. */

#ifndef KVF_OPENSSL_H
#define KVF_OPENSSL_H

#include <stddef.h>
#include <stdint.h>

#include "bytes.h"

typedef struct ssl_st SSL;
typedef struct ssl_ctx_st SSL_CTX;
typedef struct ssl_method_st SSL_METHOD;
typedef struct bio_st BIO;
typedef struct bio_method_st BIO_METHOD;
typedef struct x509_st X509;
typedef struct evp_pkey_st EVP_PKEY;
typedef struct evp_md_st EVP_MD;

#define KVF_OPENSSL_FUNCTIONS(F)                                                                     \
    F(const SSL_METHOD *, TLS_server_method, (void))                                                 \
    F(const SSL_METHOD *, TLS_client_method, (void))                                                 \
    F(SSL_CTX *, SSL_CTX_new, (const SSL_METHOD *))                                                  \
    F(void, SSL_CTX_free, (SSL_CTX *))                                                               \
    F(long, SSL_CTX_ctrl, (SSL_CTX *, int command, long, void *))                                    \
    F(int, SSL_CTX_set_ciphersuites, (SSL_CTX *, const char *))                                      \
    F(int, SSL_CTX_set_num_tickets, (SSL_CTX *, size_t))                                             \
    F(int, SSL_CTX_use_certificate_ASN1, (SSL_CTX *, int size, const unsigned char *))               \
    F(int, SSL_CTX_use_PrivateKey, (SSL_CTX *, EVP_PKEY *))                                          \
    F(int, SSL_CTX_check_private_key, (const SSL_CTX *))                                             \
    F(SSL *, SSL_new, (SSL_CTX *))                                                                   \
    F(void, SSL_free, (SSL *))                                                                       \
    F(void, SSL_set_bio, (SSL *, BIO *, BIO *))                                                      \
    F(void, SSL_set_accept_state, (SSL *))                                                           \
    F(void, SSL_set_connect_state, (SSL *))                                                          \
    F(int, SSL_do_handshake, (SSL *))                                                                \
    F(int, SSL_read_ex, (SSL *, void *, size_t, size_t *))                                           \
    F(int, SSL_write_ex, (SSL *, const void *, size_t, size_t *))                                    \
    F(int, SSL_pending, (const SSL *))                                                               \
    F(int, SSL_key_update, (SSL *, int))                                                             \
    F(int, SSL_get_error, (const SSL *, int))                                                        \
    F(X509 *, SSL_get1_peer_certificate, (const SSL *))                                              \
    F(int, X509_digest, (const X509 *, const EVP_MD *, unsigned char *, unsigned int *))             \
    F(void, X509_free, (X509 *))                                                                     \
    F(const EVP_MD *, EVP_sha256, (void))                                                            \
    F(EVP_PKEY *, d2i_AutoPrivateKey, (EVP_PKEY **, const unsigned char **, long))                   \
    F(void, EVP_PKEY_free, (EVP_PKEY *))                                                             \
    F(int, BIO_get_new_index, (void))                                                                \
    F(BIO_METHOD *, BIO_meth_new, (int, const char *))                                               \
    F(int, BIO_meth_set_write, (BIO_METHOD *, int (*)(BIO *, const char *, int)))                    \
    F(int, BIO_meth_set_read, (BIO_METHOD *, int (*)(BIO *, char *, int)))                           \
    F(int, BIO_meth_set_ctrl, (BIO_METHOD *, long (*)(BIO *, int, long, void *)))                    \
    F(BIO *, BIO_new, (const BIO_METHOD *))                                                          \
    F(int, BIO_free, (BIO *))                                                                        \
    F(void, BIO_set_data, (BIO *, void *))                                                           \
    F(void *, BIO_get_data, (BIO *))                                                                 \
    F(void, BIO_set_init, (BIO *, int))                                                              \
    F(void, BIO_set_flags, (BIO *, int))                                                             \
    F(void, BIO_clear_flags, (BIO *, int))                                                           \
    F(void, ERR_clear_error, (void))

/* Numbers that OpenSSL's headers define; they are part of its binary interface. */
enum {
    SSL_CTRL_SET_SESS_CACHE_MODE = 44,
    SSL_CTRL_CLEAR_MODE = 78,
    SSL_MODE_AUTO_RETRY = 0x04,
    SSL_KEY_UPDATE_NOT_REQUESTED = 0,
    SSL_CTRL_SET_MIN_PROTO_VERSION = 123,
    TLS1_3_VERSION = 0x0304,
    SSL_ERROR_WANT_READ = 2,
    SSL_ERROR_ZERO_RETURN = 6,
    BIO_FLAGS_READ = 0x01,
    BIO_FLAGS_RWS = 0x07,
    BIO_FLAGS_SHOULD_RETRY = 0x08,
    BIO_TYPE_SOURCE_SINK = 0x0400,
    BIO_CTRL_FLUSH = 11,
};

struct kvf_openssl {
#define F(result, name, arguments) result (*name) arguments;
    KVF_OPENSSL_FUNCTIONS(F)
#undef F
};

/* The functions, after kvf_tls_why_none has returned NULL. */
KVF_HIDDEN extern struct kvf_openssl kvf_openssl;

#endif
