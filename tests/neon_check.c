/* Holds every path of a build to recorded bytes and to the portable path, without Python: for machines that only an
 * emulator runs. tests/neon_check.py writes the records, cross-compiles this with the library's sources and runs it:
 * neon_check CODECS MATRICES. Exit status 0: all equal.
 *
 * A record of CODECS: struct tq_codec, then int32 n_rows, float rows[n_rows][head_dim], and, where the codec encodes,
 * codes and scales as numpy makes them of each row. Of MATRICES: struct matrix, then its rows, float x[n_x][n], and as
 * gguf-py and numpy have them float values[n_rows][n] and products[n_x][n_rows]. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tqgguf.h"

enum { HEADS = 2, GROUP = 4, PAGES = 9, OWN = 21, MOST_ROWS = 3 };

static const char *paths[] = {"portable", "avx2", "avx512", "neon"};
static int n_wrong;

static void expect(int holds, const char *path, const struct tq_codec *codec, const char *what)
{
    if (holds)
        return;
    n_wrong++;
    printf("%s: kind %d, head_dim %d, %d scales: %s\n", path, codec->kind, codec->head_dim, codec->n_scales, what);
}

static void *some(size_t bytes)
{
    void *memory = calloc(1, bytes + 64);
    if (memory == NULL)
        exit(2);
    return memory;
}

static uint32_t state = 12345;

static uint32_t random_bits(void)
{
    state = state * 1664525 + 1013904223;
    return state >> 8;
}

static float random_number(void)
{
    return (float)((int)random_bits() - (1 << 23)) / (float)(1 << 23);
}

static int code_bytes(const struct tq_codec *codec)
{
    return codec->head_dim / codec->block_size * codec->code_bytes;
}

static int scale_count(const struct tq_codec *codec)
{
    return codec->head_dim / codec->block_size * codec->n_scales;
}

/* Random blocks [PAGES][HEADS][TQ_PAGE] with scales around 1; float rows of the same shape for float kinds. */
static struct tq_plane random_pages(const struct tq_codec *codec)
{
    int is_float = codec->kind >= TQ_F16, width = codec->kind == TQ_F32 ? 4 : 2;
    int64_t token = is_float ? width * codec->head_dim : code_bytes(codec), n = (int64_t)PAGES * HEADS * TQ_PAGE;
    uint8_t *codes = some((size_t)(n * token));
    for (int64_t i = 0; i < n * token && !is_float; i++)
        codes[i] = (uint8_t)random_bits();
    for (int64_t i = 0; i < n * codec->head_dim && is_float; i++) {
        float x = random_number();
        uint32_t bits;
        memcpy(&bits, &x, 4);
        uint16_t half = codec->kind == TQ_BF16 ? (uint16_t)(bits >> 16) : (uint16_t)(0x3000 + random_bits() % 0xc00);
        memcpy(codes + i * width, width == 4 ? (void *)&bits : (void *)&half, (size_t)width);
    }
    int n_scales = scale_count(codec);
    uint16_t *scales = some((size_t)(n * n_scales * 2));
    for (int64_t i = 0; i < n * n_scales; i++)
        scales[i] = (uint16_t)(0x3800 + random_bits() % 0x800);
    struct tq_plane plane = {.codes = codes, .scales = scales, .page = HEADS * TQ_PAGE * token, .head = TQ_PAGE * token,
                             .token = token, .kind = codec->kind};
    plane.scale_page = HEADS * TQ_PAGE * n_scales * 2;
    plane.scale_head = TQ_PAGE * n_scales * 2;
    return plane;
}

static struct tq_plane random_rows(int head_dim)
{
    struct tq_codec f16 = {.kind = TQ_F16, .head_dim = head_dim, .block_size = 1, .code_bytes = 2};
    return random_pages(&f16);
}

static void check_encoding(const struct tq_codec *codec, int n_rows, const float *rows, const uint8_t *codes,
                           const uint16_t *scales, const char *path)
{
    struct tq_plane plane = {.codes = (const uint8_t *)rows, .token = 4 * codec->head_dim, .kind = TQ_F32};
    size_t code_size = (size_t)n_rows * code_bytes(codec), scale_size = 2 * (size_t)n_rows * scale_count(codec);
    uint8_t *found = some(code_size);
    uint16_t *found_scales = some(scale_size);
    int result = tq_encode(codec, &plane, 1, n_rows, found, found_scales);
    expect(result == 0 && memcmp(found, codes, code_size) == 0, path, codec, "other codes than numpy's");
    expect(result == 0 && memcmp(found_scales, scales, scale_size) == 0, path, codec, "other scales than numpy's");
    free(found);
    free(found_scales);
}

static int selectable(const char *path)
{
    return tq_select_path(path) == 0;
}

static void check_decoding(const struct tq_codec *codec)
{
    size_t size = sizeof(float) * PAGES * HEADS * TQ_PAGE * (size_t)codec->head_dim;
    float *expected = some(size), *found = some(size);
    struct tq_plane pages = random_pages(codec);
    tq_select_path("portable");
    tq_decode_pages(codec, &pages, PAGES, HEADS, expected);
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++)
        if (selectable(paths[i])) {
            tq_decode_pages(codec, &pages, PAGES, HEADS, found);
            expect(memcmp(found, expected, size) == 0, paths[i], codec, "decodes to other values");
        }
    free((void *)pages.codes);
    free((void *)pages.scales);
    free(expected);
    free(found);
}

static void check_attention(const struct tq_codec *k, const struct tq_codec *v, int n_rows)
{
    float query[HEADS * GROUP * MOST_ROWS * TQ_MAX_HEAD_DIM];
    int32_t slots[PAGES];
    size_t n = (size_t)HEADS * GROUP * n_rows * v->head_dim;
    for (int i = 0; i < PAGES; i++)
        slots[i] = PAGES - 1 - i;
    float *expected = some(4 * n), *found = some(4 * n);
    for (int i = 0; i < HEADS * GROUP * n_rows * k->head_dim; i++)
        query[i] = random_number();
    struct tq_attention step = {.k_codec = k, .v_codec = v, .k_pages = random_pages(k), .v_pages = random_pages(v),
                                .k_own = random_rows(k->head_dim), .v_own = random_rows(v->head_dim), .slots = slots,
                                .query = query, .out_head = (int64_t)n_rows * v->head_dim,
                                .query_kind = TQ_F32, .query_head = 4 * n_rows * k->head_dim,
                                .query_row = 4 * k->head_dim, .n_kv_heads = HEADS, .group = GROUP, .n_rows = n_rows,
                                .offset = PAGES * TQ_PAGE + OWN - n_rows, .n_prefix = 4, .window = 900, .scale = 0.05};
    step.k_prefix = step.k_own;
    step.v_prefix = step.v_own;
    tq_select_path("portable");
    step.out = expected;
    expect(tq_attend(&step, 1) == 0, "portable", k, "no memory");
    step.out = found;
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++)
        if (selectable(paths[i])) {
            double error = 0, norm = 0;
            expect(tq_attend(&step, 1) == 0, paths[i], k, "no memory");
            for (size_t at = 0; at < n; at++) {
                error += pow((double)found[at] - expected[at], 2);
                norm += pow(expected[at], 2);
            }
            expect(error <= 1e-10 * norm, paths[i], k, "attends differently");
        }
    struct tq_plane planes[] = {step.k_pages, step.v_pages, step.k_own, step.v_own};
    for (int i = 0; i < 4; i++) {
        free((void *)planes[i].codes);
        free((void *)planes[i].scales);
    }
    free(expected);
    free(found);
}

static void read_into(void *to, size_t bytes, FILE *file)
{
    if (fread(to, 1, bytes, file) != bytes)
        exit(2);
}

static float *read_floats(int64_t n, FILE *file)
{
    float *floats = some(4 * (size_t)n);
    read_into(floats, 4 * (size_t)n, file);
    return floats;
}

static int check_codecs(FILE *file)
{
    struct tq_codec codec, before = {0};
    int32_t n_rows, n_records = 0;
    while (fread(&codec, sizeof codec, 1, file) == 1) {
        read_into(&n_rows, sizeof n_rows, file);
        size_t row_size = 4 * (size_t)codec.head_dim, code_size = (size_t)n_rows * code_bytes(&codec);
        float *rows = some((size_t)n_rows * row_size);
        read_into(rows, (size_t)n_rows * row_size, file);
        if (codec.is_encoded) {
            uint8_t *codes = some(code_size);
            uint16_t *scales = some(2 * (size_t)n_rows * scale_count(&codec));
            read_into(codes, code_size, file);
            read_into(scales, 2 * (size_t)n_rows * scale_count(&codec), file);
            for (size_t i = 0; i < sizeof paths / sizeof *paths; i++)
                if (selectable(paths[i]))
                    check_encoding(&codec, n_rows, rows, codes, scales, paths[i]);
            free(codes);
            free(scales);
        }
        n_records++;
        free(rows);
        if (codec.kind == TQ_SEARCHED_HALVES)
            continue;
        if (codec.kind < TQ_F16)
            check_decoding(&codec);
        if (before.head_dim != codec.head_dim) /* the first type of a head size goes with itself */
            before = codec;
        check_attention(&before, &codec, 1);
        check_attention(&codec, &before, MOST_ROWS);
        before = codec;
    }
    return n_records;
}

struct matrix {
    int64_t type, row_bytes, n_rows, n, n_x;
};

static void expect_of_matrix(int holds, const char *path, const struct matrix *matrix, const char *what)
{
    if (holds)
        return;
    n_wrong++;
    printf("%s: type %d, %d vectors: %s\n", path, (int)matrix->type, (int)matrix->n_x, what);
}

static int check_matrices(FILE *file)
{
    struct matrix record;
    int n_records = 0;
    while (fread(&record, sizeof record, 1, file) == 1) {
        int64_t n_values = record.n_rows * record.n, n_products = record.n_x * record.n_rows;
        uint8_t *rows = some((size_t)(record.row_bytes * record.n_rows));
        read_into(rows, (size_t)(record.row_bytes * record.n_rows), file);
        float *x = read_floats(record.n_x * record.n, file);
        float *values = read_floats(n_values, file), *products = read_floats(n_products, file);
        float *found = some(4 * (size_t)(n_values > n_products ? n_values : n_products));
        struct tq_matrix matrix = {rows, NULL, record.type, record.row_bytes, record.n_rows, record.n};
        for (size_t i = 0; i < sizeof paths / sizeof *paths; i++)
            if (selectable(paths[i])) {
                double error = 0, norm = 0;
                int result = tq_decode_rows(&matrix, found);
                expect_of_matrix(result == 0 && memcmp(found, values, 4 * (size_t)n_values) == 0, paths[i], &record,
                                 "decodes to other values than gguf-py's");
                result = tq_products(&matrix, 1, record.n_x, x, &found);
                for (int64_t at = 0; at < n_products; at++) {
                    error += pow((double)found[at] - products[at], 2);
                    norm += pow(products[at], 2);
                }
                expect_of_matrix(result == 0 && error <= 1e-12 * norm, paths[i], &record, "multiplies differently");
            }
        float *floats[] = {x, values, products, found};
        for (int i = 0; i < 4; i++)
            free(floats[i]);
        free(rows);
        n_records++;
    }
    return n_records;
}

int main(int argc, char **argv)
{
    FILE *codecs = argc == 3 ? fopen(argv[1], "rb") : NULL, *matrices = argc == 3 ? fopen(argv[2], "rb") : NULL;
    if (codecs == NULL || matrices == NULL)
        return 2;
    tq_set_threads(2);
    int n_codecs = check_codecs(codecs), n_matrices = check_matrices(matrices);
    fclose(codecs);
    fclose(matrices);
    tq_select_path("");
    printf("%d codecs and %d products, best path %s: %d differences\n", n_codecs, n_matrices, tq_path_name(), n_wrong);
    return n_wrong != 0 || n_codecs == 0 || n_matrices == 0;
}
