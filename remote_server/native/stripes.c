/* The choice of an instruction set. */

#include "bytes.h"

#include <string.h>

#if defined(__x86_64__)

#include <cpuid.h>

/* True if the processor has a feature (a bit of EBX of CPUID leaf 7) and the kernel saves its registers (XCR0).
 * __builtin_cpu_supports denies every feature, or does not link, where zig supplies the compiler's library. */
static bool has(uint32_t feature, uint32_t registers)
{
    uint32_t a, b, c, d, saved, saved_high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE))
        return false;
    __asm__("xgetbv" : "=a"(saved), "=d"(saved_high) : "c"(0));
    return (saved & registers) == registers && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & feature);
}

#endif

/* The set of that name, or the best (`name` is NULL). NULL if it is unknown or the processor lacks it. */
static const struct kvf_stripes *find(const char *name)
{
#if defined(__x86_64__)
    if ((!name || strcmp(name, "avx512") == 0) && has(bit_AVX512F, 0xe6)) /* vectors of 128, 256, 512 bits, masks */
        return &kvf_avx512;
    if ((!name || strcmp(name, "avx2") == 0) && has(bit_AVX2, 0x06)) /* vectors of 128, 256 bits */
        return &kvf_avx2;
#endif
    return !name || strcmp(name, "plain") == 0 ? &kvf_plain : NULL;
}

const struct kvf_stripes *kvf_stripes; /* set at load, before any thread of this library */

static __attribute__((constructor)) void choose(void)
{
    kvf_stripes = find(NULL);
}

const char *kvf_instructions(void)
{
    return kvf_stripes->name;
}

int kvf_use_instructions(const char *name)
{
    const struct kvf_stripes *found = find(name);
    if (!found)
        return -1;
    kvf_stripes = found;
    return 0;
}
