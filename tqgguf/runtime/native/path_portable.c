/* The path for plain C: the texts of decode, encode and attend over its vectors. */
#include <math.h>

#include "lanes_portable.h"

#define SUMS 8 /* vectors of sums that stay in registers beside codes and tables */

#include "decode.inc"
#include "encode.inc"
#include "attend.inc"

KERNELS_TO_4(F32)

static tq_scores_fn *const score_kernels[TQ_N_KINDS][TQ_MAX_QUERIES] = {
    ROW_TO_4(scores, F32),
};

static tq_values_fn *const value_kernels[TQ_N_KINDS][TQ_MAX_QUERIES] = {
    ROW_TO_4(values, F32),
};

PATH(portable)
