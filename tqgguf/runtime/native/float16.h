/* float16 and bfloat16 in integer arithmetic, for single numbers: the same results on every machine. */
#ifndef TQ_FLOAT16_H
#define TQ_FLOAT16_H

#include <stdint.h>
#include <string.h>

static inline uint32_t tq_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline float tq_float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline float tq_from_f16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest >= 0x7c00) /* infinity and NaN */
        return tq_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    /* As float32 the exponent is 112 too low; multiplying also makes subnormal halves normal. */
    return tq_float(sign | tq_bits(tq_float(rest << 13) * 0x1p112f));
}

/* Rounds to nearest, ties to even. x is finite. */
static inline uint16_t tq_to_f16(float x)
{
    uint32_t bits = tq_bits(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest >= 0x477ff000) /* 65520 and above */
        return (uint16_t)(sign | 0x7c00);
    if (rest < 0x38800000) /* below 2^-14: adding 0.5 rounds to the subnormals' unit, 2^-24 */
        return (uint16_t)(sign | (tq_bits(tq_float(rest) + 0.5f) - 0x3f000000));
    rest += 0xfff + (rest >> 13 & 1);
    return (uint16_t)(sign | (rest - (112u << 23)) >> 13);
}

static inline float tq_from_bf16(uint16_t h)
{
    return tq_float((uint32_t)h << 16);
}

#endif
