/* The path for AVX-512: the texts of decode, encode and attend over its vectors. */
#if defined(__x86_64__)

#include <math.h>

#include "lanes_avx512.h"

#define SUMS 16 /* vectors of sums that stay in registers beside codes and tables */

#include "decode.inc"
#include "encode.inc"
#include "attend.inc"

KERNELS_TO_8(F32)
KERNELS_TO_8(NIBBLE_PAIRS)
KERNELS_TO_8(CRUMBS)
KERNELS_TO_8(CRUMBS_HIGH)
KERNELS_TO_8(NIBBLE_HALVES)
KERNELS_TO_8(BYTES)
KERNELS_TO_8(F16)

static tq_scores_fn *const score_kernels[TQ_N_KINDS][TQ_MAX_QUERIES] = {
    ROW_TO_8(scores, F32),
    ROW_TO_8(scores, NIBBLE_PAIRS),
    ROW_TO_8(scores, CRUMBS),
    ROW_TO_8(scores, CRUMBS_HIGH),
    ROW_TO_8(scores, NIBBLE_HALVES),
    ROW_TO_8(scores, BYTES),
    ROW_TO_8(scores, F16),
};

static tq_values_fn *const value_kernels[TQ_N_KINDS][TQ_MAX_QUERIES] = {
    ROW_TO_8(values, F32),
    ROW_TO_8(values, NIBBLE_PAIRS),
    ROW_TO_8(values, CRUMBS),
    ROW_TO_8(values, CRUMBS_HIGH),
    ROW_TO_8(values, NIBBLE_HALVES),
    ROW_TO_8(values, BYTES),
    ROW_TO_8(values, F16),
};

PATH(avx512)

#endif
