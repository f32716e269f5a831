/* Steps of attention from blocks, of one sequence or several: new rows written into the tails, queries rotated once, keys split into units that threads share, one decode of
 * every code for all queries of a KV head, softmax online within a unit, units merged by log-sum-exp, outputs rotated
 * back once.
 *
 * A unit is a KV head of a sequence and either a run of pages (blocks, in the rotated domain) or the own page with the
 * exact prefix (in original axes; alone where the own page is a block too). Runs depend on the step alone and are merged
 * in order, so results are the same for any number of threads and for any other sequences beside it. Rows of codes are
 * read in rows.c. */
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "float16.h"
#include "pages.h"
#include "path.h"
#include "rotate.h"
#include "rows.h"
#include "threads.h"

enum {
    LEAST_RUN = 4,          /* pages; smaller units cost more in merging than they gain in balance */
    LARGEST_RUN = TQ_PAGE,
    MOST_RUNS = 64,         /* of a head */
    PARTIAL_QUERIES = 2048, /* queries times runs of a head: bounds what units leave to be merged */
    SMALL_STEP = 1 << 21    /* multiplications below which waking other threads costs more than it gains */
};

struct step {
    const struct tq_attention *a;
    const struct tq_path *path;
    int first_unit;              /* of the units of all steps */
    int n_queries, k_dim, v_dim; /* queries of a KV head: its heads times rows */
    int n_pages, pages_per_run, n_runs, n_units;
    int k_kernels, v_kernels;    /* whether kernels read the codes of pages themselves */
    float *plain, *coded;        /* queries [n_kv_heads][n_queries][k_dim], scaled; coded as pages are */
    float *partial;              /* [n_kv_heads][n_units] times n_queries maxima, sums, and sums of values */
    atomic_int *left;            /* units of each head that are not done yet */
    size_t partial_size;
};

struct batch {
    struct step *steps;
    int n_steps;
    float *scratch; /* of each worker */
    size_t scratch_size;
};

/* A worker's memory, all with a pitch of TQ_PAGE per query or row of scales. */
struct scratch {
    float *scores, *offsets, *factors, *decoded, *merged;
};

/* Some keys and values at consecutive positions: rows lo .. hi - 1 of a page, the page's row 0 at `position`. */
struct tile {
    const struct tq_plane *k, *v;
    int64_t page, position;
    int lo, hi, coded;
    int64_t next;         /* how many pages after this one in the planes the next one lies; 0: there is none */
    const float *offsets; /* added to the scores of each query, or NULL */
};

static size_t multiple_of_16(size_t n)
{
    return (n + 15) / 16 * 16;
}

static struct scratch scratch_of(const struct step *s, float *at)
{
    struct scratch scratch;
    scratch.scores = at;
    scratch.offsets = scratch.scores + (size_t)s->n_queries * TQ_PAGE;
    scratch.factors = scratch.offsets + (size_t)s->n_queries * TQ_PAGE;
    scratch.decoded = scratch.factors + TQ_MAX_ROW_SCALES * TQ_PAGE;
    scratch.merged = scratch.decoded + TQ_DECODED_ROWS * (s->k_dim > s->v_dim ? s->k_dim : s->v_dim);
    return scratch;
}

static size_t size_of_scratch(const struct step *s)
{
    size_t decoded = TQ_DECODED_ROWS * (size_t)(s->k_dim > s->v_dim ? s->k_dim : s->v_dim);
    size_t floats = 2 * (size_t)s->n_queries * TQ_PAGE + TQ_MAX_ROW_SCALES * TQ_PAGE + decoded + 2 * (size_t)s->v_dim;
    return multiple_of_16(floats);
}

/* Bytes of a row's codes. */
static int row_bytes(const struct tq_codec *codec, int64_t kind)
{
    if (kind < TQ_F16)
        return codec->head_dim / codec->block_size * codec->code_bytes;
    return codec->head_dim * (kind == TQ_F32 ? 4 : 2);
}

/* The rows of a tile on one side, with their scales, which go to `factors`. */
static struct tq_rows rows_of(const struct step *s, const struct tq_codec *codec, const struct tq_plane *plane,
                              const struct tile *tile, int64_t head, float *factors)
{
    const uint8_t *page = plane->codes + tile->page * plane->page + head * plane->head;
    struct tq_rows rows = {.codes = page + tile->lo * plane->token, .stride = plane->token, .factors = factors,
                           .n = tile->hi - tile->lo, .width = row_bytes(codec, plane->kind),
                           .ahead = tile->next * plane->page};
    if (plane->kind < TQ_F16) {
        int n = tq_row_scales(codec);
        const char *scales = (const char *)plane->scales + tile->page * plane->scale_page + head * plane->scale_head;
        tq_load_scales(s->path, (const uint16_t *)(const void *)scales + (size_t)tile->lo * n, rows.n, n, factors);
    }
    return rows;
}

/* Where the first position that row `row` of the step sees lies in a tile, at least lo. */
static int first_seen(const struct tq_attention *a, const struct tile *tile, int64_t row)
{
    int64_t first = a->window ? a->offset + row - a->window + 1 - tile->position : tile->lo;
    return (int)(first > tile->lo ? first : tile->lo);
}

/* Where the keys end that row `row` sees, at most hi. */
static int end_seen(const struct tq_attention *a, const struct tile *tile, int64_t row)
{
    int64_t end = a->offset + row + 1 - tile->position;
    return (int)(end < tile->hi ? end : tile->hi);
}

static void hide_unseen(const struct step *s, const struct tile *tile, float *scores)
{
    int64_t n_rows = s->a->n_rows;
    int first_row_end = end_seen(s->a, tile, 0), last_row_first = first_seen(s->a, tile, n_rows - 1);
    if (first_row_end == tile->hi && last_row_first == tile->lo)
        return;
    for (int q = 0; q < s->n_queries; q++) {
        float *row = scores + (ptrdiff_t)q * TQ_PAGE;
        int lo = first_seen(s->a, tile, q % n_rows), hi = end_seen(s->a, tile, q % n_rows);
        for (int t = tile->lo; t < tile->hi; t++)
            if (t < lo || t >= hi)
                row[t - tile->lo] = -INFINITY;
    }
}

/* Take a tile into a unit's softmax: maxima[n_queries], then sums[n_queries], then sums of values. */
static void see(const struct step *s, struct tile tile, int64_t head, float *partial, struct scratch scratch)
{
    const struct tq_attention *a = s->a;
    tile.lo = first_seen(a, &tile, 0);
    tile.hi = end_seen(a, &tile, a->n_rows - 1);
    if (tile.lo >= tile.hi)
        return;
    const float *queries = (tile.coded ? s->coded : s->plain) + head * s->n_queries * s->k_dim;
    int k_kernels = tile.coded ? s->k_kernels : tq_has_kernels(s->path, tile.k->kind, s->n_queries);
    int v_kernels = tile.coded ? s->v_kernels : tq_has_kernels(s->path, tile.v->kind, s->n_queries);

    struct tq_rows rows = rows_of(s, a->k_codec, tile.k, &tile, head, scratch.factors);
    tq_score_rows(s->path, k_kernels, (int)tile.k->kind, a->k_codec, &rows, s->n_queries, queries, scratch.scores,
                  scratch.decoded);
    for (int q = 0; q < s->n_queries && tile.offsets != NULL; q++)
        for (int t = 0; t < rows.n; t++)
            scratch.scores[q * TQ_PAGE + t] += tile.offsets[q * TQ_PAGE];
    hide_unseen(s, &tile, scratch.scores);

    float *maxima = partial, *sums = maxima + s->n_queries;
    float *values = partial + multiple_of_16(2 * (size_t)s->n_queries);
    for (int q = 0; q < s->n_queries; q++) {
        float decay = s->path->soften(scratch.scores + (ptrdiff_t)q * TQ_PAGE, rows.n, maxima + q, sums + q);
        if (decay != 1.0f)
            s->path->blend(values + (ptrdiff_t)q * s->v_dim, decay, NULL, 0.0f, s->v_dim);
    }
    rows = rows_of(s, a->v_codec, tile.v, &tile, head, scratch.factors);
    tq_add_rows(s->path, v_kernels, (int)tile.v->kind, a->v_codec, &rows, s->n_queries, scratch.scores, values,
                scratch.decoded);
}

/* query . mean of each page of a run, to offsets[query][page of the run]. Pages that lie one after the other are scored
 * together. */
static void score_means(const struct step *s, int64_t head, const int32_t *slots, int n, struct scratch scratch)
{
    const struct tq_attention *a = s->a;
    int has_kernels = tq_has_kernels(s->path, TQ_F16, s->n_queries);
    for (int first = 0, end; first < n; first = end) {
        for (end = first + 1; end < n && slots[end] == slots[end - 1] + 1;)
            end++;
        struct tq_rows means = {.codes = (const uint8_t *)a->page_means + slots[first] * a->mean_page
                                         + head * a->mean_head,
                                .stride = a->mean_page, .factors = scratch.factors, .n = end - first};
        tq_score_rows(s->path, has_kernels, TQ_F16, a->k_codec, &means, s->n_queries,
                      s->plain + head * s->n_queries * s->k_dim, scratch.scores, scratch.decoded);
        for (int q = 0; q < s->n_queries; q++)
            memcpy(scratch.offsets + (ptrdiff_t)q * TQ_PAGE + first, scratch.scores + (ptrdiff_t)q * TQ_PAGE,
                   (size_t)means.n * sizeof(float));
    }
}

static void see_run(const struct step *s, int64_t head, int run, float *partial, struct scratch scratch)
{
    const struct tq_attention *a = s->a;
    int first = run * s->pages_per_run, n = s->n_pages - first;
    const int32_t *slots = a->slots + first;
    n = n < s->pages_per_run ? n : s->pages_per_run;
    if (a->page_means != NULL)
        score_means(s, head, slots, n, scratch);
    for (int i = 0; i < n; i++) {
        int64_t page = a->first_page + first + i;
        see(s,
            (struct tile){.k = &a->k_pages, .v = &a->v_pages, .page = slots[i], .position = page * TQ_PAGE,
                          .lo = page == 0 ? (int)a->n_prefix : 0, .hi = TQ_PAGE, .coded = 1,
                          .next = i + 1 < n ? slots[i + 1] - slots[i] : 0,
                          .offsets = a->page_means != NULL ? scratch.offsets + i : NULL},
            head, partial, scratch);
    }
}

static void see_own(const struct step *s, int64_t head, float *partial, struct scratch scratch)
{
    const struct tq_attention *a = s->a;
    int64_t start = a->offset / TQ_PAGE * TQ_PAGE;
    if (!a->own_coded)
        see(s, (struct tile){.k = &a->k_own, .v = &a->v_own, .position = start, .hi = TQ_PAGE}, head, partial, scratch);
    if ((start > 0 || a->own_coded) && a->first_page == 0 && a->n_prefix > 0)
        see(s, (struct tile){.k = &a->k_prefix, .v = &a->v_prefix, .hi = (int)a->n_prefix}, head, partial, scratch);
}

static void reorder(const uint8_t *order, float *x, int n, int back)
{
    float from[16];
    for (; n > 0; n -= 16, x += 16) {
        memcpy(from, x, sizeof from);
        for (int i = 0; i < 16; i++)
            if (back)
                x[order[i]] = from[i];
            else
                x[i] = from[order[i]];
    }
}

/* Every unit of a head to its outputs. The last unit of each head is the own page. */
static void merge(const struct step *s, int64_t head, struct scratch scratch)
{
    const struct tq_attention *a = s->a;
    const float *partial = s->partial + (size_t)head * s->n_units * s->partial_size;
    size_t values_at = multiple_of_16(2 * (size_t)s->n_queries);
    float *coded = scratch.merged, *plain = coded + s->v_dim;
    for (int q = 0; q < s->n_queries; q++) {
        int64_t query_head = head * a->group + q / a->n_rows;
        float maximum = a->sinks != NULL ? a->sinks[query_head] : -INFINITY;
        for (int unit = 0; unit < s->n_units; unit++)
            maximum = fmaxf(maximum, partial[unit * s->partial_size + (size_t)q]);
        float sum = a->sinks != NULL ? expf(a->sinks[query_head] - maximum) : 0.0f;
        memset(coded, 0, 2 * (size_t)s->v_dim * sizeof(float));
        for (int unit = 0; unit < s->n_units; unit++) {
            const float *from = partial + unit * s->partial_size;
            float weight = expf(from[q] - maximum);
            if (weight == 0.0f)
                continue;
            sum += weight * from[s->n_queries + q];
            s->path->blend(unit < s->n_runs ? coded : plain, 1.0f, from + values_at + (size_t)q * s->v_dim, weight,
                           s->v_dim);
        }
        if (s->n_runs > 0) {
            if (s->v_kernels && a->v_pages.kind == TQ_NIBBLE_PAIRS && s->path->pair_order != NULL)
                reorder(s->path->pair_order, coded, s->v_dim, 1);
            if (a->v_pages.kind < TQ_F16)
                tq_rotate(a->v_codec, coded, 1);
        }
        float *out = a->out + query_head * a->out_head + q % a->n_rows * s->v_dim;
        for (int i = 0; i < s->v_dim; i++)
            out[i] = (plain[i] + coded[i]) / sum;
    }
}

static void run_unit(void *context, int index, int worker)
{
    const struct batch *batch = context;
    const struct step *s = batch->steps;
    while (index - s->first_unit >= s->a->n_kv_heads * s->n_units)
        s++;
    index -= s->first_unit;
    struct scratch scratch = scratch_of(s, batch->scratch + (size_t)worker * batch->scratch_size);
    /* heads of one run after each other: what they read lies side by side */
    int64_t head = index % s->a->n_kv_heads;
    int unit = (int)(index / s->a->n_kv_heads);
    float *partial = s->partial + ((size_t)head * s->n_units + unit) * s->partial_size;
    memset(partial, 0, s->partial_size * sizeof(float));
    for (int q = 0; q < s->n_queries; q++)
        partial[q] = -INFINITY;
    if (unit < s->n_runs)
        see_run(s, head, unit, partial, scratch);
    else
        see_own(s, head, partial, scratch);
    if (atomic_fetch_sub(&s->left[head], 1) == 1)
        merge(s, head, scratch);
}

static float number_of(int64_t kind, const uint8_t *at)
{
    if (kind == TQ_F32) {
        uint32_t bits;
        memcpy(&bits, at, 4);
        return tq_float(bits);
    }
    uint16_t bits;
    memcpy(&bits, at, 2);
    return kind == TQ_F16 ? tq_from_f16(bits) : tq_from_bf16(bits);
}

/* The queries times the scale; and divided by the channel scale, rotated, in the order of the kernels. */
static void prepare_queries(const struct step *s)
{
    const struct tq_attention *a = s->a;
    int width = a->query_kind == TQ_F32 ? 4 : 2, is_coded = a->k_pages.kind < TQ_F16;
    float scale = (float)a->scale;
    for (int64_t head = 0; head < a->n_kv_heads * a->group; head++) {
        const float *divisor = a->channel_scale == NULL ? NULL : a->channel_scale + head / a->group * s->k_dim;
        for (int64_t row = 0; row < a->n_rows; row++) {
            const uint8_t *from = (const uint8_t *)a->query + head * a->query_head + row * a->query_row;
            float *plain = s->plain + (head * a->n_rows + row) * s->k_dim;
            float *coded = s->coded + (head * a->n_rows + row) * s->k_dim;
            for (int i = 0; i < s->k_dim; i++)
                plain[i] = number_of(a->query_kind, from + (size_t)i * width) * scale;
            if (s->n_runs == 0)
                continue;
            for (int i = 0; i < s->k_dim; i++)
                coded[i] = divisor == NULL ? plain[i] : plain[i] / divisor[i];
            if (is_coded)
                tq_rotate(a->k_codec, coded, 0);
            if (s->k_kernels && a->k_pages.kind == TQ_NIBBLE_PAIRS && s->path->pair_order != NULL)
                reorder(s->path->pair_order, coded, s->k_dim, 0);
        }
    }
}

/* A function of the step alone, so that results do not depend on the number of threads. */
static int pages_per_run(int n_pages, int n_queries)
{
    int most_runs = PARTIAL_QUERIES / n_queries;
    most_runs = most_runs < 4 ? 4 : most_runs > MOST_RUNS ? MOST_RUNS : most_runs;
    int pages = (n_pages + most_runs - 1) / most_runs;
    return pages < LEAST_RUN ? LEAST_RUN : pages > LARGEST_RUN ? LARGEST_RUN : pages;
}

/* float16 of any number: finite ones stay finite. */
static uint16_t finite_f16(float x)
{
    uint32_t bits = tq_bits(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000)
        return (uint16_t)(sign | 0x7e00);
    if (rest < 0x7f800000 && rest > 0x477fe000) /* 65504 */
        return (uint16_t)(sign | 0x7bff);
    return tq_to_f16(x);
}

static void append_side(const struct tq_attention *a, const struct tq_codec *codec, const struct tq_plane *new,
                        const struct tq_plane *own)
{
    if (new->codes == NULL)
        return;
    int64_t first = a->offset % TQ_PAGE, size = new->kind == TQ_F32 ? 4 : 2;
    for (int64_t head = 0; head < a->n_kv_heads; head++)
        for (int64_t row = 0; row < a->n_rows; row++) {
            const uint8_t *from = new->codes + head * new->head + row * new->token;
            uint8_t *to = (uint8_t *)(uintptr_t)own->codes + head * own->head + (first + row) * own->token;
            if (new->kind == TQ_F16)
                memcpy(to, from, 2 * (size_t)codec->head_dim);
            for (int i = 0; new->kind != TQ_F16 && i < codec->head_dim; i++) {
                uint16_t bits = finite_f16(number_of(new->kind, from + i * size));
                memcpy(to + 2 * (ptrdiff_t)i, &bits, 2);
            }
        }
}

/* How a step is cut into units, and the floats that it needs beside what workers do. */
static size_t plan(struct step *s, const struct tq_attention *a)
{
    *s = (struct step){.a = a, .path = tq_path(), .n_queries = (int)(a->group * a->n_rows),
                       .k_dim = a->k_codec->head_dim, .v_dim = a->v_codec->head_dim};
    if (a->n_rows == 0)
        return 0;
    s->n_pages = (int)(a->offset / TQ_PAGE - a->first_page + (a->own_coded != 0));
    s->pages_per_run = pages_per_run(s->n_pages, s->n_queries);
    s->n_runs = (s->n_pages + s->pages_per_run - 1) / s->pages_per_run;
    s->n_units = s->n_runs + 1;
    s->k_kernels = tq_has_kernels(s->path, a->k_pages.kind, s->n_queries);
    s->v_kernels = tq_has_kernels(s->path, a->v_pages.kind, s->n_queries);
    s->partial_size = multiple_of_16(2 * (size_t)s->n_queries) + (size_t)s->n_queries * s->v_dim;
    size_t counters = multiple_of_16((size_t)a->n_kv_heads * sizeof(atomic_int) / sizeof(float) + 1);
    return (size_t)a->n_kv_heads * (2 * (size_t)s->n_queries * s->k_dim + s->n_units * s->partial_size) + counters;
}

/* Give a planned step its memory; returns where it ends. */
static float *place(struct step *s, float *at)
{
    size_t n_heads = (size_t)s->a->n_kv_heads, n_queries = n_heads * s->n_queries;
    s->plain = at;
    s->coded = s->plain + n_queries * s->k_dim;
    s->partial = s->coded + n_queries * s->k_dim;
    s->left = (atomic_int *)(s->partial + n_heads * s->n_units * s->partial_size);
    for (size_t head = 0; head < n_heads; head++)
        atomic_init(&s->left[head], s->n_units);
    return (float *)s->left + multiple_of_16(n_heads * sizeof(atomic_int) / sizeof(float) + 1);
}

static void prepare(const struct step *s)
{
    append_side(s->a, s->a->k_codec, &s->a->k_new, &s->a->k_own);
    append_side(s->a, s->a->v_codec, &s->a->v_new, &s->a->v_own);
    prepare_queries(s);
}

int tq_attend(const struct tq_attention *attention, int64_t n)
{
    struct batch batch = {.steps = malloc((size_t)n * sizeof(struct step))};
    if (batch.steps == NULL)
        return -1;
    size_t floats = 0;
    int64_t n_products = 0;
    int n_units = 0;
    for (int64_t i = 0; i < n; i++) {
        const struct tq_attention *a = attention + i;
        struct step *s = batch.steps + batch.n_steps;
        size_t own = plan(s, a);
        if (own == 0)
            continue;
        floats += own;
        s->first_unit = n_units;
        n_units += (int)a->n_kv_heads * s->n_units;
        n_products += (a->offset + a->n_rows - a->first_page * TQ_PAGE) * a->n_kv_heads * s->n_queries
                      * (s->k_dim + s->v_dim);
        size_t scratch = size_of_scratch(s);
        batch.scratch_size = scratch > batch.scratch_size ? scratch : batch.scratch_size;
        batch.n_steps++;
    }

    void *memory;
    if (posix_memalign(&memory, 64, (floats + tq_threads() * batch.scratch_size + 1) * sizeof(float)) != 0) {
        free(batch.steps);
        return -1;
    }
    batch.scratch = memory;
    float *at = batch.scratch + tq_threads() * batch.scratch_size;
    for (int i = 0; i < batch.n_steps; i++) {
        at = place(batch.steps + i, at);
        prepare(batch.steps + i);
    }
    if (n_products < SMALL_STEP)
        for (int unit = 0; unit < n_units; unit++)
            run_unit(&batch, unit, 0);
    else
        tq_share(n_units, run_unit, &batch);
    free(memory);
    free(batch.steps);
    return 0;
}
