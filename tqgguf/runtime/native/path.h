/* What one instruction set offers: the functions that every path_*.c instantiates from the same texts (decode.inc,
 * attend.inc, encode.inc) over its own vectors. Chosen in dispatch.c. */
#ifndef TQ_PATH_H
#define TQ_PATH_H

#include <stddef.h>

#include "tqgguf.h"

enum { TQ_MAX_QUERIES = 8 }; /* most queries that one kernel call takes in any path */

/* n rows of one head, at most TQ_PAGE, whose codes lie `stride` bytes apart. Scale j of row t as f32:
 * factors[j * TQ_PAGE + t]. The bytes (`width` a row) that lie `ahead` of them are needed soon; 0: none are known. */
struct tq_rows {
    const uint8_t *codes;
    int64_t stride;
    const float *factors;
    int n, width;
    int64_t ahead;
};

/* out[q][TQ_PAGE] = query[q] . row for each row. Entries up to the next multiple of 16 rows may be overwritten. */
typedef void tq_scores_fn(const struct tq_codec *codec, const struct tq_rows *rows, const float *query, float *out);

/* sums[q] += sum over rows of weights[q][TQ_PAGE] * row. */
typedef void tq_values_fn(const struct tq_codec *codec, const struct tq_rows *rows, const float *weights, float *sums);

struct tq_path {
    const char *name;
    int lanes;

    /* Kernels by kind and number of queries - 1, with gaps; kinds that have none are decoded and read as TQ_F32. */
    tq_scores_fn *const (*scores)[TQ_MAX_QUERIES];
    tq_values_fn *const (*values)[TQ_MAX_QUERIES];

    /* In kernels for TQ_NIBBLE_PAIRS entry i of every 16 is the value at place pair_order[i]; NULL: natural order. */
    const uint8_t *pair_order;

    /* Rows to out [n][head_dim], in natural order, scaled, rotated. */
    void (*decode)(int kind, const struct tq_codec *codec, const struct tq_rows *rows, float *out);

    void (*widen)(const uint16_t *f16, int64_t n, float *out);

    /* Take n scores of one query into its softmax: scores become weights exp(score - maximum), entries up to the next
     * multiple of 16 become 0. Returns by how much sums so far are to be multiplied. */
    float (*soften)(float *scores, int n, float *maximum, float *sum);

    /* x[i] = x[i] * factor + add[i] * weight, with add possibly NULL. */
    void (*blend)(float *x, float factor, const float *add, float weight, int n);

    /* Encodes up to `lanes` rows; see tq_encode for the result. */
    int (*encode)(const struct tq_codec *codec, int kind, const uint8_t *const *rows, int n, uint8_t *codes,
                  uint16_t *scales);
};

extern const struct tq_path tq_path_portable;
#if defined(__x86_64__)
extern const struct tq_path tq_path_avx2, tq_path_avx512;
#elif defined(__aarch64__)
extern const struct tq_path tq_path_neon;
#endif

/* The path that serves (dispatch.c). */
const struct tq_path *tq_path(void);

#endif
