/* NEON vectors: 4 lanes. A codebook is held as planes of bytes; a table look-up per plane finds 16 codes at once. */
#include <arm_neon.h>

#include "float16.h"
#include "path.h"

#define TARGET
#include "lanes.h"

#define LANES 4
#define STEP_VECTORS 4
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
#define PAIR_ORDER NULL

INLINE vf v_load(const float *p) { return (vf)vld1q_f32(p); }
INLINE void v_store(float *p, vf x) { vst1q_f32(p, (float32x4_t)x); }
INLINE vf v_set1(float x) { return (vf)vdupq_n_f32(x); }
INLINE vf v_fma(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
INLINE vf v_sqrt(vf x) { return (vf)vsqrtq_f32((float32x4_t)x); }
INLINE int v_any(vi x) { return vmaxvq_u32((uint32x4_t)x) != 0; }
INLINE vf v_select(vi mask, vf a, vf b) { return (vf)vbslq_f32((uint32x4_t)mask, (float32x4_t)a, (float32x4_t)b); }
INLINE vf v_max(vf a, vf b) { return v_select(a > b, a, b); }
INLINE vf v_natural(int kind, vf x) { (void)kind; return x; }

INLINE vf v_widen(const uint8_t *p)
{
    float16x4_t half;
    memcpy(&half, p, sizeof half);
    return (vf)vcvt_f32_f16(half);
}

/* Sums of 8 vectors, each over its lanes, in order. */
INLINE void v_sums(const vf *x, float *sums)
{
    for (int i = 0; i < 8; i += 4) {
        float32x4_t a = vpaddq_f32((float32x4_t)x[i], (float32x4_t)x[i + 1]);
        float32x4_t b = vpaddq_f32((float32x4_t)x[i + 2], (float32x4_t)x[i + 3]);
        vst1q_f32(sums + i, vpaddq_f32(a, b));
    }
}

/* Byte `plane` of 32 codebook values: values 0 .. 15 and 16 .. 31. */
struct tables {
    uint8x16x2_t plane[4];
};

INLINE struct tables load_tables(int kind, const struct tq_codec *codec)
{
    struct tables tables;
    uint8_t bytes[4][32];
    (void)kind;
    for (int i = 0; i < 32; i++) {
        uint32_t bits = tq_bits(codec->values[i]);
        for (int plane = 0; plane < 4; plane++)
            bytes[plane][i] = (uint8_t)(bits >> 8 * plane);
    }
    for (int plane = 0; plane < 4; plane++) {
        tables.plane[plane].val[0] = vld1q_u8(bytes[plane]);
        tables.plane[plane].val[1] = vld1q_u8(bytes[plane] + 16);
    }
    return tables;
}

/* 16 codes below 32 to their values. */
INLINE void look_up(uint8x16_t codes, int n_codes, const struct tables *tables, vf x[4])
{
    uint8x16_t byte[4];
    for (int plane = 0; plane < 4; plane++)
        byte[plane] = n_codes <= 16 ? vqtbl1q_u8(tables->plane[plane].val[0], codes)
                                    : vqtbl2q_u8(tables->plane[plane], codes);
    uint16x8_t low[2] = {vreinterpretq_u16_u8(vzip1q_u8(byte[0], byte[1])),
                         vreinterpretq_u16_u8(vzip2q_u8(byte[0], byte[1]))};
    uint16x8_t high[2] = {vreinterpretq_u16_u8(vzip1q_u8(byte[2], byte[3])),
                          vreinterpretq_u16_u8(vzip2q_u8(byte[2], byte[3]))};
    for (int i = 0; i < 2; i++) {
        x[2 * i] = (vf)vzip1q_u16(low[i], high[i]);
        x[2 * i + 1] = (vf)vzip2q_u16(low[i], high[i]);
    }
}

/* 16 bits as 16 bytes: `value` where the bit is set, else 0. */
INLINE uint8x16_t spread_bits(const uint8_t *bits, uint8_t value)
{
    static const uint8_t places[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    uint8x16_t bytes = vcombine_u8(vdup_n_u8(bits[0]), vdup_n_u8(bits[1]));
    return vandq_u8(vtstq_u8(bytes, vld1q_u8(places)), vdupq_n_u8(value));
}

/* Values STEP * step .. + STEP - 1 of a block, unscaled. */
INLINE void decode_step(int kind, const uint8_t *codes, const uint8_t *high, int step, const struct tables *tables,
                        vf x[STEP_VECTORS])
{
    switch (kind) {
    case TQ_NIBBLE_PAIRS: {
        uint8x8_t c = vld1_u8(codes + 8 * step), low = vand_u8(c, vdup_n_u8(15)), rest = vshr_n_u8(c, 4);
        look_up(vcombine_u8(vzip1_u8(low, rest), vzip2_u8(low, rest)), 16, tables, x);
        break;
    }
    case TQ_NIBBLE_HALVES:
    case TQ_HIGH_HALVES: {
        uint8x16_t c = vld1q_u8(codes);
        c = step ? vshrq_n_u8(c, 4) : vandq_u8(c, vdupq_n_u8(15));
        if (kind == TQ_HIGH_HALVES)
            c = vorrq_u8(c, spread_bits(high + 2 * step, 16));
        look_up(c, kind == TQ_HIGH_HALVES ? 32 : 16, tables, x);
        break;
    }
    case TQ_CRUMBS:
    case TQ_CRUMBS_HIGH: {
        static const uint8_t sources[16] = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
        static const int8_t shifts[16] = {0, -2, -4, -6, 0, -2, -4, -6, 0, -2, -4, -6, 0, -2, -4, -6};
        uint8x16_t c = vreinterpretq_u8_u32(vdupq_n_u32((uint32_t)load_i32(codes + 4 * step)));
        c = vandq_u8(vshlq_u8(vqtbl1q_u8(c, vld1q_u8(sources)), vld1q_s8(shifts)), vdupq_n_u8(3));
        if (kind == TQ_CRUMBS_HIGH)
            c = vorrq_u8(c, spread_bits(high + 2 * step, 4));
        look_up(c, 8, tables, x);
        break;
    }
    case TQ_BYTES: {
        int8x16_t c = vld1q_s8((const int8_t *)codes + 16 * step);
        int16x8_t wide[2] = {vmovl_s8(vget_low_s8(c)), vmovl_high_s8(c)};
        for (int i = 0; i < 2; i++) {
            x[2 * i] = (vf)vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide[i])));
            x[2 * i + 1] = (vf)vcvtq_f32_s32(vmovl_high_s16(wide[i]));
        }
        break;
    }
    default:
        for (int v = 0; v < 4; v++) {
            int at = 16 * step + 4 * v;
            if (kind == TQ_F16) {
                x[v] = v_widen(codes + 2 * at);
            } else if (kind == TQ_BF16) {
                uint16x4_t half;
                memcpy(&half, codes + 2 * at, sizeof half);
                x[v] = (vf)vshll_n_u16(half, 16);
            } else {
                memcpy(&x[v], codes + 4 * at, sizeof x[v]);
            }
        }
        break;
    }
}
