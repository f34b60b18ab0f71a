/* The loading of libssl.so.3 at run time. */

#define _GNU_SOURCE

#include "openssl.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

#include "tls.h"

#define LIBRARY "libssl.so.3"

struct kvf_openssl kvf_openssl;

static char why_none[160];

/* It is never unloaded: other parts of the process may use it, and its threads' data have destructors. */
static void load(void)
{
    void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(why_none, sizeof why_none, LIBRARY " is missing");
        return;
    }
    /* dlsym also searches libcrypto, which libssl needs. ISO C has no cast from an object to a function. */
#define F(result, name, arguments)                                                             \
    if (!(*(void **)&kvf_openssl.name = dlsym(library, #name)) && !*why_none)                  \
        snprintf(why_none, sizeof why_none, LIBRARY " has no %s", #name);
    KVF_OPENSSL_FUNCTIONS(F)
#undef F
}

const char *kvf_tls_why_none(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, load);
    return *why_none ? why_none : NULL;
}
