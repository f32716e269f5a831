/* Scores of rows, and sums of weighted rows, for any number of queries; see rows.c. */
#ifndef TQ_ROWS_H
#define TQ_ROWS_H

#include "path.h"

enum { TQ_DECODED_ROWS = 32 }; /* rows decoded at a time where no kernel reads their codes: they stay in L1 */

/* Whether kernels of the path read codes of this kind for so many queries: if so, queries and sums of values are in the
 * order of those kernels (path.h). */
int tq_has_kernels(const struct tq_path *path, int64_t kind, int n_queries);

/* scores[q][TQ_PAGE] = queries[q] . row. by_kernels: what tq_has_kernels said. decoded: memory for TQ_DECODED_ROWS
 * rows. */
void tq_score_rows(const struct tq_path *path, int by_kernels, int kind, const struct tq_codec *codec,
                   const struct tq_rows *rows, int n_queries, const float *queries, float *scores, float *decoded);

/* sums[q] += sum over rows of weights[q][TQ_PAGE] * row. */
void tq_add_rows(const struct tq_path *path, int by_kernels, int kind, const struct tq_codec *codec,
                 const struct tq_rows *rows, int n_queries, const float *weights, float *sums, float *decoded);

#endif
