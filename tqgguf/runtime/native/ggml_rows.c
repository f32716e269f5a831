/* Matrices in ggml's types times vectors, read as the file holds them, and their rows decoded.
 *
 * The work is split into runs of rows, each multiplied by all vectors, so that what a run reads comes from memory once.
 * A product is the same in whatever run its row is. */
#include "ggml_rows.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "path.h"
#include "threads.h"

enum {
    RUN_BYTES = 1 << 17,     /* most bytes of a run: as long as the prefetchers like, and in the second cache */
    RUNS_PER_THREAD = 4,     /* shorter runs where there are not so many: threads end at the same time */
    ROWS_PER_RUN_UNIT = 16,  /* kernels take so many rows at a time */
    DECODED_VALUES = 1 << 16 /* of a run of rows that are decoded */
};

typedef float v4 __attribute__((vector_size(16)));

static const struct tq_row_path *row_path(void)
{
#if defined(__x86_64__)
    if (tq_path() == &tq_path_avx512)
        return &tq_row_path_avx512;
    if (tq_path() == &tq_path_avx2)
        return &tq_row_path_avx2;
#elif defined(__aarch64__)
    if (tq_path() == &tq_path_neon)
        return &tq_row_path_neon;
#endif
    return &tq_row_path_portable;
}

int tq_serves_rows(int64_t type, int64_t n)
{
    switch (type) {
    case TQ_ROWS_F32:
    case TQ_ROWS_F16:
    case TQ_ROWS_BF16:
    case TQ_ROWS_Q4_0:
    case TQ_ROWS_Q4_1:
    case TQ_ROWS_Q5_0:
    case TQ_ROWS_Q5_1:
    case TQ_ROWS_Q8_0: return n > 0 && n % TQ_ROW_GROUP == 0;
    case TQ_ROWS_Q4_K:
    case TQ_ROWS_Q5_K:
    case TQ_ROWS_Q6_K: return n > 0 && n % 256 == 0;
    default: return 0;
    }
}

/* A vector's sums over groups, in the order that every path shares, to `sums` of 3 * (groups + TQ_ROW_PAD) floats. */
static struct tq_vector with_sums(const float *x, int64_t n, float *sums)
{
    int64_t n_groups = n / TQ_ROW_GROUP;
    float *pairs = sums + n_groups + TQ_ROW_PAD;
    for (int64_t g = 0; g < n_groups; g++) {
        v4 sum = {0, 0, 0, 0};
        for (int i = 0; i < TQ_ROW_GROUP; i += 4) {
            v4 some;
            memcpy(&some, x + g * TQ_ROW_GROUP + i, sizeof some);
            sum += some;
        }
        sums[g] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
        pairs[2 * g] = 0;
        pairs[2 * g + 1] = sums[g];
    }
    memset(sums + n_groups, 0, TQ_ROW_PAD * sizeof *sums);
    memset(pairs + 2 * n_groups, 0, TQ_ROW_PAD * sizeof *pairs);
    return (struct tq_vector){x, sums, pairs};
}

struct products {
    const struct tq_row_path *path;
    const struct tq_matrix *matrices;
    float *const *outs;
    int64_t n_x;
    const struct tq_vector *x;
    int64_t rows_of_run[TQ_MAX_MATRICES]; /* and the number of the run after a matrix's last */
    int end_run[TQ_MAX_MATRICES];
};

static void multiply_run(void *context, int run, int worker)
{
    const struct products *p = context;
    int i = 0;
    (void)worker;
    while (run >= p->end_run[i])
        i++;
    const struct tq_matrix *m = &p->matrices[i];
    int64_t first = (run - (i ? p->end_run[i - 1] : 0)) * p->rows_of_run[i];
    int64_t n_rows = m->n_rows - first < p->rows_of_run[i] ? m->n_rows - first : p->rows_of_run[i];
    for (int64_t j = 0; j < p->n_x; j++) {
        float *out = p->outs[i] + j * m->n_rows + first;
        p->path->dots((int)m->type, m->rows + first * m->row_bytes, m->row_bytes, n_rows, m->n, &p->x[j], out);
        for (int64_t r = 0; m->bias != NULL && r < n_rows; r++)
            out[r] += m->bias[first + r];
    }
}

int tq_products(const struct tq_matrix *matrices, int64_t n_matrices, int64_t n_x, const float *x, float *const *outs)
{
    int64_t n = n_matrices > 0 ? matrices[0].n : 0, n_bytes = 0;
    if (n_matrices < 1 || n_matrices > TQ_MAX_MATRICES || n_x < 0)
        return -1;
    for (int i = 0; i < n_matrices; i++) {
        if (matrices[i].n != n || !tq_serves_rows(matrices[i].type, n))
            return -1;
        n_bytes += matrices[i].n_rows * matrices[i].row_bytes;
    }
    int64_t n_sums = 3 * (n / TQ_ROW_GROUP + TQ_ROW_PAD);
    char *memory = malloc((size_t)n_x * (sizeof(struct tq_vector) + (size_t)n_sums * sizeof(float)));
    if (memory == NULL && n_x > 0)
        return -2;
    struct tq_vector *vectors = (void *)memory;
    float *sums = (void *)(vectors + n_x);
    for (int64_t j = 0; j < n_x; j++)
        vectors[j] = with_sums(x + j * n, n, sums + j * n_sums);

    struct products products = {row_path(), matrices, outs, n_x, vectors, {0}, {0}};
    int64_t run_bytes = n_bytes / (RUNS_PER_THREAD * tq_threads()), n_runs = 0;
    for (int i = 0; i < n_matrices; i++) {
        int64_t units = (run_bytes < RUN_BYTES ? run_bytes : RUN_BYTES) / (matrices[i].row_bytes * ROWS_PER_RUN_UNIT);
        products.rows_of_run[i] = (units > 0 ? units : 1) * ROWS_PER_RUN_UNIT;
        n_runs += (matrices[i].n_rows + products.rows_of_run[i] - 1) / products.rows_of_run[i];
        products.end_run[i] = (int)n_runs;
    }
    if (n_x > 0)
        tq_share((int)n_runs, multiply_run, &products);
    free(memory);
    return 0;
}

struct decoding {
    const struct tq_row_path *path;
    const struct tq_matrix *matrix;
    int64_t run;
    float *out;
};

static void decode_run(void *context, int unit, int worker)
{
    const struct decoding *d = context;
    const struct tq_matrix *m = d->matrix;
    int64_t first = unit * d->run, n_rows = m->n_rows - first < d->run ? m->n_rows - first : d->run;
    (void)worker;
    d->path->values((int)m->type, m->rows + first * m->row_bytes, m->row_bytes, n_rows, m->n, d->out + first * m->n);
}

int tq_decode_rows(const struct tq_matrix *matrix, float *out)
{
    if (!tq_serves_rows(matrix->type, matrix->n))
        return -1;
    int64_t run = DECODED_VALUES / matrix->n > 0 ? DECODED_VALUES / matrix->n : 1;
    struct decoding decoding = {row_path(), matrix, run, out};
    tq_share((int)((matrix->n_rows + run - 1) / run), decode_run, &decoding);
    return 0;
}
