/* AVX-512 vectors: 16 lanes. Looking a code up in a codebook is one permute of a register. */
#include <immintrin.h>
#include <string.h>

#include "float16.h"
#include "path.h"

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#include "lanes.h"

#define LANES 16
#define STEP_VECTORS 2
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));

INLINE vf v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
INLINE vf v_set1(float x) { return _mm512_set1_ps(x); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf v_sqrt(vf x) { return _mm512_sqrt_ps(x); }
INLINE vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf v_widen(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p)); }
INLINE int v_any(vi x) { return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0; }
INLINE vf v_select(vi mask, vf a, vf b)
{
    return _mm512_mask_blend_ps(_mm512_movepi32_mask((__m512i)mask), b, a);
}

/* Sums of 16 vectors, each over its lanes, in order. */
INLINE void v_sums(const vf *x, float *sums)
{
    __m512 a[8], b[4];
    for (int i = 0; i < 8; i++)
        a[i] = _mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]) + _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]);
    for (int i = 0; i < 4; i++) {
        __m512d p = (__m512d)a[2 * i], q = (__m512d)a[2 * i + 1];
        b[i] = (__m512)_mm512_unpacklo_pd(p, q) + (__m512)_mm512_unpackhi_pd(p, q);
    }
    __m512 c = _mm512_shuffle_f32x4(b[0], b[1], 0x44) + _mm512_shuffle_f32x4(b[0], b[1], 0xee);
    __m512 d = _mm512_shuffle_f32x4(b[2], b[3], 0x44) + _mm512_shuffle_f32x4(b[2], b[3], 0xee);
    v_store(sums, _mm512_shuffle_f32x4(c, d, 0x88) + _mm512_shuffle_f32x4(c, d, 0xdd));
}

/* Codebook values by the low four bits of an index; two registers where a mask tells the high bit. */
struct tables {
    __m512 low, high;
};

INLINE struct tables load_tables(int kind, const struct tq_codec *codec)
{
    struct tables tables;
    if (kind == TQ_CRUMBS || kind == TQ_CRUMBS_HIGH) { /* repeated, so that only the index's low two bits count */
        tables.low = _mm512_broadcast_f32x4(_mm_loadu_ps(codec->values));
        tables.high = _mm512_broadcast_f32x4(_mm_loadu_ps(codec->values + 4));
    } else {
        tables.low = v_load(codec->values);
        tables.high = v_load(codec->values + 16);
    }
    return tables;
}

/* Eight bytes of nibble pairs repeated: shifted so, lanes 2i and 2i + 1 hold values i and i + 8 in their low bits. */
#define PAIR_SHIFTS _mm512_setr_epi32(0, 0, 4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 28, 28)
#define CRUMB_SHIFTS _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
static const uint8_t PAIR_ORDER[16] = {0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15};

INLINE vf v_natural(int kind, vf x)
{
    const __m512i lanes = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    return kind == TQ_NIBBLE_PAIRS ? (vf)_mm512_permutexvar_ps(lanes, x) : x;
}

/* Values STEP * step .. + STEP - 1 of a block, unscaled, pairs in PAIR_ORDER. */
INLINE void decode_step(int kind, const uint8_t *codes, const uint8_t *high, int step, const struct tables *tables,
                        vf x[STEP_VECTORS])
{
    if (kind == TQ_NIBBLE_HALVES || kind == TQ_HIGH_HALVES) {
        __m512i c = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)(codes + 16 * step)));
        for (int v = 0; v < 2; v++, c = _mm512_srli_epi32(c, 4)) {
            __m512 low = _mm512_permutexvar_ps(c, tables->low);
            x[v] = kind == TQ_NIBBLE_HALVES
                       ? low
                       : _mm512_mask_permutexvar_ps(low, load_u16(high + 2 * v), c, tables->high);
        }
        return;
    }
    for (int v = 0; v < 2; v++) {
        int at = 2 * step + v; /* in units of 16 values */
        switch (kind) {
        case TQ_NIBBLE_PAIRS: {
            __m512i c = _mm512_srlv_epi32(_mm512_set1_epi64(load_i64(codes + 8 * at)), PAIR_SHIFTS);
            x[v] = _mm512_permutexvar_ps(c, tables->low);
            break;
        }
        case TQ_CRUMBS:
        case TQ_CRUMBS_HIGH: {
            __m512i c = _mm512_srlv_epi32(_mm512_set1_epi32(load_i32(codes + 4 * at)), CRUMB_SHIFTS);
            __m512 low = _mm512_permutexvar_ps(c, tables->low);
            x[v] = kind == TQ_CRUMBS ? low
                                     : _mm512_mask_permutexvar_ps(low, load_u16(high + 2 * at), c, tables->high);
            break;
        }
        case TQ_BYTES:
            x[v] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(codes + 16 * at))));
            break;
        case TQ_F16: x[v] = v_widen(codes + 32 * at); break;
        case TQ_BF16: {
            __m512i c = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(codes + 32 * at)));
            x[v] = (__m512)_mm512_slli_epi32(c, 16);
            break;
        }
        default: x[v] = _mm512_loadu_ps(codes + 64 * at); break;
        }
    }
}
