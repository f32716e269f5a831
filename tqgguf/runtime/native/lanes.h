/* What every lanes_*.h needs: included by each after it has defined TARGET, the attribute that its functions carry. */
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline, unused)) TARGET

#if defined(__clang__)
#define UNROLL_16 _Pragma("unroll 16")
#else
#define UNROLL_16 _Pragma("GCC unroll 16")
#endif

INLINE uint16_t load_u16(const uint8_t *p)
{
    uint16_t x;
    memcpy(&x, p, 2);
    return x;
}

INLINE int32_t load_i32(const uint8_t *p)
{
    int32_t x;
    memcpy(&x, p, 4);
    return x;
}

INLINE int64_t load_i64(const uint8_t *p)
{
    int64_t x;
    memcpy(&x, p, 8);
    return x;
}
