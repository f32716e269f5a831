/* Rows of a matrix in ggml's own types: what ggml_rows.c chooses from, and every ggml_rows_*.c brings. */
#ifndef TQ_GGML_ROWS_H
#define TQ_GGML_ROWS_H

#include <stdint.h>

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

/* out[r] = row r . x for rows of n values, row_bytes apart; sums[g]: of x's group g. `type` is one of the above. */
typedef void tq_row_dots_fn(int type, const uint8_t *rows, int64_t row_bytes, int64_t n_rows, int64_t n, const float *x,
                            const float *sums, float *out);

tq_row_dots_fn tq_row_dots_portable;
#if defined(__x86_64__)
tq_row_dots_fn tq_row_dots_avx2, tq_row_dots_avx512;
#elif defined(__aarch64__)
tq_row_dots_fn tq_row_dots_neon;
#endif

#endif
