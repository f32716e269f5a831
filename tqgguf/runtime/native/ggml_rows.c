/* A matrix in a ggml type times a vector: the output layer of a decode step, read as the file holds it.
 *
 * The work is split into runs of rows; what a run reads comes from memory once, and memory is what bounds it. */
#include "ggml_rows.h"

#include <stddef.h>
#include <stdlib.h>

#include "path.h"
#include "threads.h"

enum { RUN_BYTES = 1 << 18 }; /* of a run of rows: long enough for the prefetchers, short enough to spread evenly */

struct products {
    tq_row_dots_fn *dots;
    int type;
    const uint8_t *rows;
    int64_t row_bytes, n_rows, n, run;
    const float *x, *sums;
    float *out;
};

static tq_row_dots_fn *row_dots(void)
{
#if defined(__x86_64__)
    if (tq_path() == &tq_path_avx512)
        return tq_row_dots_avx512;
    if (tq_path() == &tq_path_avx2)
        return tq_row_dots_avx2;
#elif defined(__aarch64__)
    if (tq_path() == &tq_path_neon)
        return tq_row_dots_neon;
#endif
    return tq_row_dots_portable;
}

/* Values that a row must be a multiple of; 0 for types that are not served. */
static int row_unit(int64_t type)
{
    switch (type) {
    case TQ_ROWS_F32:
    case TQ_ROWS_F16:
    case TQ_ROWS_BF16:
    case TQ_ROWS_Q4_0:
    case TQ_ROWS_Q4_1:
    case TQ_ROWS_Q5_0:
    case TQ_ROWS_Q5_1:
    case TQ_ROWS_Q8_0: return TQ_ROW_GROUP;
    case TQ_ROWS_Q4_K:
    case TQ_ROWS_Q5_K:
    case TQ_ROWS_Q6_K: return 256;
    default: return 0;
    }
}

static void multiply_run(void *context, int unit, int worker)
{
    const struct products *p = context;
    int64_t first = unit * p->run, n_rows = p->n_rows - first < p->run ? p->n_rows - first : p->run;
    (void)worker;
    p->dots(p->type, p->rows + first * p->row_bytes, p->row_bytes, n_rows, p->n, p->x, p->sums, p->out + first);
}

int tq_row_products(int64_t type, const uint8_t *rows, int64_t row_bytes, int64_t n_rows, int64_t n, const float *x,
                    float *out)
{
    int unit = row_unit(type);
    if (unit == 0 || n < 1 || n % unit != 0)
        return -1;
    if (n_rows < 1)
        return 0;
    float *sums = malloc((size_t)(n / TQ_ROW_GROUP) * sizeof *sums);
    if (sums == NULL)
        return -2;
    for (int64_t g = 0; g < n / TQ_ROW_GROUP; g++) {
        double sum = 0;
        for (int i = 0; i < TQ_ROW_GROUP; i++)
            sum += x[g * TQ_ROW_GROUP + i];
        sums[g] = (float)sum;
    }
    int64_t run = row_bytes < RUN_BYTES ? RUN_BYTES / row_bytes : 1;
    struct products products = {row_dots(), (int)type, rows, row_bytes, n_rows, n, run, x, sums, out};
    tq_share((int)((n_rows + run - 1) / run), multiply_run, &products);
    free(sums);
    return 0;
}
