/* AVX2 vectors: 8 lanes. A register holds 8 codebook values; 16 are two registers and a blend by a code's high bit. */
#include <immintrin.h>

#include "float16.h"
#include "path.h"

#define TARGET __attribute__((target("avx2,fma,f16c")))
#include "lanes.h"

#define LANES 8
#define STEP_VECTORS 2
typedef float vf __attribute__((vector_size(32)));
typedef int32_t vi __attribute__((vector_size(32)));
#define PAIR_ORDER NULL

INLINE vf v_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void v_store(float *p, vf x) { _mm256_storeu_ps(p, x); }
INLINE vf v_set1(float x) { return _mm256_set1_ps(x); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf v_sqrt(vf x) { return _mm256_sqrt_ps(x); }
INLINE vf v_max(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf v_widen(const uint8_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const void *)p)); }
INLINE int v_any(vi x) { return !_mm256_testz_si256((__m256i)x, (__m256i)x); }
INLINE vf v_select(vi mask, vf a, vf b) { return _mm256_blendv_ps(b, a, (__m256)mask); }
INLINE vf v_natural(int kind, vf x) { (void)kind; return x; }

/* Sums of 8 vectors, each over its lanes, in order. */
INLINE void v_sums(const vf *x, float *sums)
{
    __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
    v_store(sums, _mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31));
}

/* Codebook values in eights; the low three bits of an index choose in a register. */
struct tables {
    __m256 eights[4];
};

INLINE struct tables load_tables(int kind, const struct tq_codec *codec)
{
    struct tables tables;
    if (kind == TQ_CRUMBS || kind == TQ_CRUMBS_HIGH) { /* repeated, so that only the index's low two bits count */
        for (int i = 0; i < 2; i++)
            tables.eights[i] = _mm256_broadcast_ps((const __m128 *)(codec->values + 4 * i));
        tables.eights[2] = tables.eights[3] = _mm256_setzero_ps();
    } else {
        for (int i = 0; i < 4; i++)
            tables.eights[i] = v_load(codec->values + 8 * i);
    }
    return tables;
}

/* One of 16 values by the low four bits of each index. */
INLINE __m256 look_up(__m256i index, const __m256 eights[2])
{
    __m256 bit_3 = (__m256)_mm256_slli_epi32(index, 28);
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(eights[0], index), _mm256_permutevar8x32_ps(eights[1], index),
                            bit_3);
}

/* Eight bits from `bits`, the first at place `first`, each as the sign bit of a lane. */
INLINE __m256 bit_mask(int32_t bits, int first)
{
    __m256i places = _mm256_sub_epi32(_mm256_set1_epi32(31 - first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    return (__m256)_mm256_sllv_epi32(_mm256_set1_epi32(bits), places);
}

#define NIBBLE_SHIFTS _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28)
#define CRUMB_SHIFTS(first) \
    _mm256_add_epi32(_mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14), _mm256_set1_epi32(2 * (first)))

/* Values STEP * step .. + STEP - 1 of a block, unscaled. */
INLINE void decode_step(int kind, const uint8_t *codes, const uint8_t *high, int step, const struct tables *tables,
                        vf x[STEP_VECTORS])
{
    for (int v = 0; v < 2; v++) {
        int at = 2 * step + v; /* in units of 8 values */
        switch (kind) {
        case TQ_NIBBLE_PAIRS:
            x[v] = look_up(_mm256_srlv_epi32(_mm256_set1_epi32(load_i32(codes + 4 * at)), NIBBLE_SHIFTS),
                           tables->eights);
            break;
        case TQ_CRUMBS:
        case TQ_CRUMBS_HIGH: {
            __m256i c = _mm256_srlv_epi32(_mm256_set1_epi32(load_i32(codes + 4 * step)), CRUMB_SHIFTS(8 * v));
            x[v] = _mm256_permutevar8x32_ps(tables->eights[0], c);
            if (kind == TQ_CRUMBS_HIGH)
                x[v] = _mm256_blendv_ps(x[v], _mm256_permutevar8x32_ps(tables->eights[1], c),
                                        bit_mask(load_u16(high + 2 * step), 8 * v));
            break;
        }
        case TQ_NIBBLE_HALVES:
        case TQ_HIGH_HALVES: {
            __m256i c = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)(codes + 8 * v)));
            if (step)
                c = _mm256_srli_epi32(c, 4);
            x[v] = look_up(c, tables->eights);
            if (kind == TQ_HIGH_HALVES)
                x[v] = _mm256_blendv_ps(x[v], look_up(c, tables->eights + 2),
                                        bit_mask(load_u16(high + 2 * step), 8 * v));
            break;
        }
        case TQ_BYTES:
            x[v] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)(codes + 8 * at))));
            break;
        case TQ_F16: x[v] = v_widen(codes + 16 * at); break;
        case TQ_BF16: {
            __m256i c = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)(codes + 16 * at)));
            x[v] = (__m256)_mm256_slli_epi32(c, 16);
            break;
        }
        default: x[v] = _mm256_loadu_ps((const float *)(const void *)(codes + 32 * at)); break;
        }
    }
}
