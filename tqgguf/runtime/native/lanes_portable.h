/* Plain C with the compilers' vector types: 4 lanes, which every machine of today has or the compiler spells out. */
#include <math.h>

#include "float16.h"
#include "path.h"

#define TARGET
#include "lanes.h"

#define LANES 4
#define STEP_VECTORS 4
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
#define PAIR_ORDER NULL

INLINE vf v_load(const float *p)
{
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE void v_store(float *p, vf x) { memcpy(p, &x, sizeof x); }
INLINE vf v_set1(float x) { return (vf){x, x, x, x}; }
INLINE vf v_fma(vf a, vf b, vf c) { return a * b + c; }
INLINE vf v_sqrt(vf x) { return (vf){sqrtf(x[0]), sqrtf(x[1]), sqrtf(x[2]), sqrtf(x[3])}; }
INLINE int v_any(vi x) { return (x[0] | x[1] | x[2] | x[3]) != 0; }
INLINE vf v_select(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
INLINE vf v_max(vf a, vf b) { return v_select(a > b, a, b); }
INLINE vf v_natural(int kind, vf x) { (void)kind; return x; }

/* tq_from_f16 for four halves at a time */
INLINE vf v_widen(const uint8_t *p)
{
    uint16_t __attribute__((vector_size(8))) halves;
    memcpy(&halves, p, sizeof halves);
    vi h = __builtin_convertvector(halves, vi), rest = h & 0x7fff;
    vi finite = (vi)((vf)(rest << 13) * 0x1p112f), other = 0x7f800000 | (rest & 0x3ff) << 13, odd = rest >= 0x7c00;
    return (vf)((h & 0x8000) << 16 | (odd & other) | (~odd & finite));
}

/* Sums of 8 vectors, each over its lanes. */
INLINE void v_sums(const vf *x, float *sums)
{
    for (int i = 0; i < 8; i++)
        sums[i] = (x[i][0] + x[i][1]) + (x[i][2] + x[i][3]);
}

struct tables {
    const float *values;
};

INLINE struct tables load_tables(int kind, const struct tq_codec *codec)
{
    (void)kind;
    return (struct tables){codec->values};
}

/* Value i of a block, unscaled. */
INLINE float decode_value(int kind, const uint8_t *codes, const uint8_t *high, int i, const float *values)
{
    int high_bit = kind == TQ_CRUMBS_HIGH || kind == TQ_HIGH_HALVES ? high[i / 8] >> i % 8 & 1 : 0;
    switch (kind) {
    case TQ_NIBBLE_PAIRS: return values[codes[i / 2] >> 4 * (i % 2) & 15];
    case TQ_CRUMBS: return values[codes[i / 4] >> 2 * (i % 4) & 3];
    case TQ_CRUMBS_HIGH: return values[(codes[i / 4] >> 2 * (i % 4) & 3) | high_bit << 2];
    case TQ_NIBBLE_HALVES: return values[codes[i % 16] >> 4 * (i / 16) & 15];
    case TQ_HIGH_HALVES: return values[(codes[i % 16] >> 4 * (i / 16) & 15) | high_bit << 4];
    case TQ_BYTES: return (float)(int8_t)codes[i];
    case TQ_BF16: return tq_from_bf16(load_u16(codes + 2 * i));
    default: return tq_float((uint32_t)load_i32(codes + 4 * i));
    }
}

/* Values STEP * step .. + STEP - 1 of a block, unscaled. */
INLINE void decode_step(int kind, const uint8_t *codes, const uint8_t *high, int step, const struct tables *tables,
                        vf x[STEP_VECTORS])
{
    const float *values = tables->values;
    for (int v = 0; v < STEP_VECTORS; v++) {
        int i = (step * STEP_VECTORS + v) * LANES;
        if (kind == TQ_F16) {
            x[v] = v_widen(codes + 2 * i);
            continue;
        }
        x[v] = (vf){decode_value(kind, codes, high, i, values), decode_value(kind, codes, high, i + 1, values),
                    decode_value(kind, codes, high, i + 2, values), decode_value(kind, codes, high, i + 3, values)};
    }
}
