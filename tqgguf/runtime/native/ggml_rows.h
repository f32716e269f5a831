/* Rows of a matrix in ggml's own types: what ggml_rows.c chooses from, and every ggml_rows_*.c brings. */
#ifndef TQ_GGML_ROWS_H
#define TQ_GGML_ROWS_H

#include <stdint.h>

#include "tqgguf.h"

enum { TQ_ROW_GROUP = 32 }; /* values that share an offset in the types that have one; rows are multiples of it */

/* Types by ggml's numbers, as GGUF files hold them. */
enum tq_row_type {
    TQ_ROWS_F32 = 0,
    TQ_ROWS_F16 = 1,
    TQ_ROWS_Q4_0 = 2,
    TQ_ROWS_Q4_1 = 3,
    TQ_ROWS_Q5_0 = 6,
    TQ_ROWS_Q5_1 = 7,
    TQ_ROWS_Q8_0 = 8,
    TQ_ROWS_Q4_K = 12,
    TQ_ROWS_Q5_K = 13,
    TQ_ROWS_Q6_K = 14,
    TQ_ROWS_BF16 = 30
};

/* A vector that rows are multiplied by, with its sums over groups: group g's in sums[g], and in pairs[2g + 1] after a
 * zero. Both go on in zeros for TQ_ROW_PAD floats. */
struct tq_vector {
    const float *values, *sums, *pairs;
};

enum { TQ_ROW_PAD = 16 };

/* What a path does with rows of n values, row_bytes apart, of one of the types above. */
struct tq_row_path {
    /* out[r] = row r . x */
    void (*dots)(int type, const uint8_t *rows, int64_t row_bytes, int64_t n_rows, int64_t n, const struct tq_vector *x,
                 float *out);
    /* out [n_rows][n]: each value rounded as gguf-py rounds it */
    void (*values)(int type, const uint8_t *rows, int64_t row_bytes, int64_t n_rows, int64_t n, float *out);
};

extern const struct tq_row_path tq_row_path_portable;
#if defined(__x86_64__)
extern const struct tq_row_path tq_row_path_avx2, tq_row_path_avx512;
#elif defined(__aarch64__)
extern const struct tq_row_path tq_row_path_neon;
#endif

#endif
