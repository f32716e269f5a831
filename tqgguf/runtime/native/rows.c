/* Rows against any number of queries, by the kernels of a path (attend.inc), which take a few queries each. Where none
 * reads the codes of a kind, or so many queries would have it decode them often, rows are decoded first, a few at a
 * time. */
#include "rows.h"

/* The largest number of queries, at most `wanted`, that a kernel of this kind takes at once; 0 where there is none. */
static int queries_at_once(const struct tq_path *path, int kind, int wanted)
{
    int n = wanted < TQ_MAX_QUERIES ? wanted : TQ_MAX_QUERIES;
    while (n > 0 && path->scores[kind][n - 1] == NULL)
        n--;
    return n;
}

int tq_has_kernels(const struct tq_path *path, int64_t kind, int n_queries)
{
    int most = queries_at_once(path, (int)kind, TQ_MAX_QUERIES);
    return most > 0 && (kind == TQ_F32 || n_queries <= most);
}

static void score_by_kernels(const struct tq_path *path, int kind, const struct tq_codec *codec,
                             const struct tq_rows *rows, int n_queries, const float *queries, float *scores)
{
    for (int q = 0, n; q < n_queries; q += n) {
        n = queries_at_once(path, kind, n_queries - q);
        path->scores[kind][n - 1](codec, rows, queries + (ptrdiff_t)q * codec->head_dim,
                                  scores + (ptrdiff_t)q * TQ_PAGE);
    }
}

static void add_by_kernels(const struct tq_path *path, int kind, const struct tq_codec *codec,
                           const struct tq_rows *rows, int n_queries, const float *weights, float *sums)
{
    for (int q = 0, n; q < n_queries; q += n) {
        n = queries_at_once(path, kind, n_queries - q);
        path->values[kind][n - 1](codec, rows, weights + (ptrdiff_t)q * TQ_PAGE,
                                  sums + (ptrdiff_t)q * codec->head_dim);
    }
}

/* The next rows from `first` on, decoded into `out`. */
static struct tq_rows decode_some(const struct tq_path *path, int kind, const struct tq_codec *codec,
                                  const struct tq_rows *rows, int first, float *out)
{
    struct tq_rows some = *rows;
    some.codes += first * rows->stride;
    some.factors += first;
    some.n = rows->n - first < TQ_DECODED_ROWS ? rows->n - first : TQ_DECODED_ROWS;
    path->decode(kind, codec, &some, out);
    int width = codec->head_dim * (int)sizeof(float);
    return (struct tq_rows){.codes = (const uint8_t *)out, .stride = width, .n = some.n, .width = width};
}

void tq_score_rows(const struct tq_path *path, int by_kernels, int kind, const struct tq_codec *codec,
                   const struct tq_rows *rows, int n_queries, const float *queries, float *scores, float *decoded)
{
    if (by_kernels) {
        score_by_kernels(path, kind, codec, rows, n_queries, queries, scores);
        return;
    }
    for (int t = 0; t < rows->n; t += TQ_DECODED_ROWS) {
        struct tq_rows some = decode_some(path, kind, codec, rows, t, decoded);
        score_by_kernels(path, TQ_F32, codec, &some, n_queries, queries, scores + t);
    }
}

void tq_add_rows(const struct tq_path *path, int by_kernels, int kind, const struct tq_codec *codec,
                 const struct tq_rows *rows, int n_queries, const float *weights, float *sums, float *decoded)
{
    if (by_kernels) {
        add_by_kernels(path, kind, codec, rows, n_queries, weights, sums);
        return;
    }
    for (int t = 0; t < rows->n; t += TQ_DECODED_ROWS) {
        struct tq_rows some = decode_some(path, kind, codec, rows, t, decoded);
        add_by_kernels(path, TQ_F32, codec, &some, n_queries, weights + t, sums);
    }
}
