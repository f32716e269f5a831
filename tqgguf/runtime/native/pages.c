/* Whole pages at a time: decoding for prefill, and encoding. Shared among threads by page or by a few rows. */
#include "pages.h"

#include <stdatomic.h>
#include <string.h>

#include "path.h"
#include "threads.h"

void tq_load_scales(const struct tq_path *path, const uint16_t *scales, int n_rows, int n_scales, float *factors)
{
    if (n_scales == 1) {
        path->widen(scales, n_rows, factors);
        return;
    }
    float some[16 * TQ_MAX_ROW_SCALES];
    for (int first = 0; first < n_rows; first += 16) {
        int n = n_rows - first < 16 ? n_rows - first : 16;
        path->widen(scales + (ptrdiff_t)first * n_scales, (int64_t)n * n_scales, some);
        for (int i = 0; i < n_scales; i++)
            for (int t = 0; t < n; t++)
                factors[i * TQ_PAGE + first + t] = some[t * n_scales + i];
    }
}

struct decoding {
    const struct tq_path *path;
    const struct tq_codec *codec;
    const struct tq_plane *pages;
    int64_t n_pages;
    float *out;
};

static void decode_unit(void *context, int unit, int worker)
{
    (void)worker;
    const struct decoding *d = context;
    const struct tq_plane *plane = d->pages;
    int64_t head = unit / d->n_pages, page = unit % d->n_pages;
    float factors[TQ_MAX_ROW_SCALES * TQ_PAGE];
    const char *scales = (const char *)plane->scales + page * plane->scale_page + head * plane->scale_head;
    tq_load_scales(d->path, (const uint16_t *)(const void *)scales, TQ_PAGE, tq_row_scales(d->codec), factors);
    struct tq_rows rows = {.codes = plane->codes + page * plane->page + head * plane->head, .stride = plane->token,
                           .factors = factors, .n = TQ_PAGE};
    d->path->decode((int)plane->kind, d->codec, &rows, d->out + (ptrdiff_t)unit * TQ_PAGE * d->codec->head_dim);
}

void tq_decode_pages(const struct tq_codec *codec, const struct tq_plane *pages, int64_t n_pages, int64_t n_heads,
                     float *out)
{
    struct decoding decoding = {tq_path(), codec, pages, n_pages, out};
    tq_share((int)(n_pages * n_heads), decode_unit, &decoding);
}

struct encoding {
    const struct tq_path *path;
    const struct tq_codec *codec;
    const struct tq_plane *rows;
    int64_t n_tokens, n_units_per_head;
    uint8_t *codes;
    uint16_t *scales;
    atomic_int result;
};

enum { ROWS_PER_UNIT = 32 }; /* a multiple of every path's lanes */

static void encode_unit(void *context, int unit, int worker)
{
    (void)worker;
    struct encoding *e = context;
    int64_t head = unit / e->n_units_per_head, first = unit % e->n_units_per_head * ROWS_PER_UNIT;
    int64_t last = first + ROWS_PER_UNIT < e->n_tokens ? first + ROWS_PER_UNIT : e->n_tokens;
    int code_bytes = e->codec->head_dim / e->codec->block_size * e->codec->code_bytes;
    for (int64_t t = first; t < last; t += e->path->lanes) {
        const uint8_t *rows[16];
        int n = (int)(last - t < e->path->lanes ? last - t : e->path->lanes);
        for (int i = 0; i < n; i++)
            rows[i] = e->rows->codes + head * e->rows->head + (t + i) * e->rows->token;
        int64_t at = head * e->n_tokens + t;
        int result = e->path->encode(e->codec, (int)e->rows->kind, rows, n, e->codes + at * code_bytes,
                                     e->scales + at * tq_row_scales(e->codec));
        if (result != 0)
            atomic_store(&e->result, result);
    }
}

int tq_encode(const struct tq_codec *codec, const struct tq_plane *rows, int64_t n_heads, int64_t n_tokens,
              uint8_t *codes, uint16_t *scales)
{
    if (!codec->is_encoded)
        return -1;
    struct encoding encoding = {.path = tq_path(), .codec = codec, .rows = rows, .n_tokens = n_tokens,
                                .n_units_per_head = (n_tokens + ROWS_PER_UNIT - 1) / ROWS_PER_UNIT,
                                .codes = codes, .scales = scales};
    tq_share((int)(n_heads * encoding.n_units_per_head), encode_unit, &encoding);
    return atomic_load(&encoding.result);
}
