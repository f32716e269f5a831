/* The path for AVX2: the texts of decode, encode and attend over its vectors. */
#if defined(__x86_64__)

#include <math.h>

#include "lanes_avx2.h"

#define SUMS 8 /* vectors of sums that stay in registers beside codes and tables */

#include "decode.inc"
#include "encode.inc"
#include "attend.inc"

KERNELS_TO_4(F32)
KERNELS_TO_4(NIBBLE_PAIRS)
KERNELS_TO_4(CRUMBS)
KERNELS_TO_4(CRUMBS_HIGH)
KERNELS_TO_4(NIBBLE_HALVES)
KERNELS_TO_4(BYTES)
KERNELS_TO_4(F16)

static tq_scores_fn *const score_kernels[TQ_N_KINDS][TQ_MAX_QUERIES] = {
    ROW_TO_4(scores, F32),
    ROW_TO_4(scores, NIBBLE_PAIRS),
    ROW_TO_4(scores, CRUMBS),
    ROW_TO_4(scores, CRUMBS_HIGH),
    ROW_TO_4(scores, NIBBLE_HALVES),
    ROW_TO_4(scores, BYTES),
    ROW_TO_4(scores, F16),
};

static tq_values_fn *const value_kernels[TQ_N_KINDS][TQ_MAX_QUERIES] = {
    ROW_TO_4(values, F32),
    ROW_TO_4(values, NIBBLE_PAIRS),
    ROW_TO_4(values, CRUMBS),
    ROW_TO_4(values, CRUMBS_HIGH),
    ROW_TO_4(values, NIBBLE_HALVES),
    ROW_TO_4(values, BYTES),
    ROW_TO_4(values, F16),
};

PATH(avx2)

#endif
