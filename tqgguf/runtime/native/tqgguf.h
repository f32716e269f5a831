/* The C library of tqgguf: turbo and ggml block codecs, and attention straight from blocks, on a CPU.
 *
 * This is the whole ABI that tqgguf/runtime/native/library.py declares for ctypes. Numbers of the formats (codebooks,
 * boundaries, sign tables) come from Python in a tq_codec and stand nowhere in C. The library knows nothing of caches,
 * models or files. Little-endian machines only. */
#ifndef TQGGUF_H
#define TQGGUF_H

#include <stdint.h>

#define TQ_EXPORT __attribute__((visibility("default")))

/* Raised whenever a struct or a function below changes: Python refuses a library of another version. */
#define TQ_ABI_VERSION 5

enum {
    TQ_PAGE = 128,         /* tokens of a page */
    TQ_MAX_BLOCK = 192,    /* values of the largest block */
    TQ_MAX_ROTATION = 512, /* values of the largest rotated part */
    TQ_MAX_HEAD_DIM = 1024,
    TQ_MAX_ROW_SCALES = 64, /* scales of a row: two for each 32 values */
    TQ_MAX_SIGNS = 128,
    TQ_MAX_MATRICES = 3 /* that are multiplied by a vector at once */
};

/* How the codes of a block are laid out. Layouts whose blocks hold 32 values are ggml's. */
enum tq_kind {
    TQ_NIBBLE_PAIRS,  /* byte j: values 2j (low) and 2j + 1 (turbo4) */
    TQ_CRUMBS,        /* byte j: values 4j .. 4j + 3, 2 bits each (turbo2) */
    TQ_CRUMBS_HIGH,   /* crumbs, then a bit plane of each code's third bit (turbo3) */
    TQ_NIBBLE_HALVES, /* byte j: values j and j + 16 (q4_0, q4_1, iq4_nl) */
    TQ_HIGH_HALVES,   /* a bit plane of each code's fifth bit, then nibble halves (q5_0, q5_1) */
    TQ_BYTES,         /* signed bytes (q8_0) */
    TQ_F16,
    TQ_BF16,
    TQ_F32,
    TQ_N_KINDS,
    TQ_SEARCHED_HALVES = TQ_N_KINDS /* tq_encode alone: iq4_nl with a search for the scale, as weights have it */
};

/* A codec for one head size. A row is a head vector: head_dim values in blocks of block_size, each with code_bytes bytes
 * of codes and n_scales f16 scales (the norm, or d and m). Value of a code c: values[c] * d (+ m); signed bytes: c * d.
 * Parts of `rotation` values are rotated: multiplied by signs[0], transformed by Walsh-Hadamard, multiplied by signs[1] *
 * factor (sign-less: ones). 0: no rotation. boundaries: n_codes - 1 decision boundaries of turbo types and of
 * TQ_SEARCHED_HALVES. is_encoded: whether
 * tq_encode makes these blocks. */
struct tq_codec {
    int32_t kind, head_dim, block_size, code_bytes, n_scales, n_codes, rotation, is_turbo, is_encoded;
    float rotation_factor;
    float signs[2][TQ_MAX_SIGNS];
    float values[32], boundaries[16];
};

/* Rows by page, head and token, distances in bytes: codes + page * p + head * h + token * t. Scales of a page and head
 * lie one token after the other. Float kinds have no scales. */
struct tq_plane {
    const uint8_t *codes;
    const uint16_t *scales;
    int64_t page, head, token, scale_page, scale_head;
    int64_t kind;
};

/* One step of attention of one sequence: n_rows queries of each head at positions offset .. offset + n_rows - 1, all in
 * one page. n_rows 0: nothing is asked, and nothing is written.
 *
 * Queries see pages first_page .. (own page - 1) through k_pages and v_pages (blocks, or floats of a float type), their
 * own page through k_own and v_own, and of page 0 the first n_prefix tokens through k_prefix and v_prefix. Page
 * first_page + i lies at index slots[i] of the planes' pages, and its mean at index slots[i] of page_means.
 *
 * k_new and v_new, where they have codes: the step's own rows by head and token, of a float kind. Before anything is
 * read they are written in float16 to their places in k_own and v_own, whose rows must be TQ_F16 and writable; finite
 * numbers stay finite. */
struct tq_attention {
    const struct tq_codec *k_codec, *v_codec;
    struct tq_plane k_pages, v_pages, k_own, v_own, k_prefix, v_prefix, k_new, v_new;
    const int32_t *slots;
    const void *query; /* [n_kv_heads * group][n_rows][head_dim of k], of query_kind */
    int64_t query_kind, query_head, query_row; /* distances in bytes */
    float *out; /* [n_kv_heads * group][n_rows][head_dim of v] */
    int64_t out_head; /* distance in values */
    const float *sinks;         /* [n_kv_heads * group] logits, or NULL */
    const float *channel_scale; /* [n_kv_heads][head_dim of k], or NULL */
    const uint16_t *page_means; /* f16 rows, or NULL; distances in bytes */
    int64_t mean_page, mean_head;
    int64_t n_kv_heads, group, n_rows, offset, first_page, n_prefix, window; /* window 0: none */
    int64_t own_coded; /* whether the own page lies among the pages and is read there, but for the exact prefix */
    double scale;
};

TQ_EXPORT int tq_abi_version(void);

/* Make this path serve from now on: "portable", "avx2", "avx512", "neon", or "" for the best. 0, or -1 where the
 * machine or the build has none of that name. */
TQ_EXPORT int tq_select_path(const char *name);
TQ_EXPORT const char *tq_path_name(void);

/* Threads that share a call's work, the caller's own included. */
TQ_EXPORT void tq_set_threads(int n);
TQ_EXPORT int tq_threads(void);

/* Blocks of pages 0 .. n_pages - 1 to out [n_heads][n_pages * TQ_PAGE][head_dim], in the rotated domain. */
TQ_EXPORT void tq_decode_pages(const struct tq_codec *codec, const struct tq_plane *pages, int64_t n_pages,
                               int64_t n_heads, float *out);

/* Rows [n_heads][n_tokens], kind TQ_F16 or TQ_F32 (`rows`; its page and scales are ignored), to planes
 * codes [n_heads][n_tokens][row code bytes] and scales [n_heads][n_tokens][scales of a row]. Returns 0; 1 where a value
 * (or a rotated value) is not finite, with the planes in an unspecified state; -1 where this codec is not encoded here. */
TQ_EXPORT int tq_encode(const struct tq_codec *codec, const struct tq_plane *rows, int64_t n_heads, int64_t n_tokens,
                        uint8_t *codes, uint16_t *scales);

/* Steps of n sequences, whose units of work threads share. 0; -1 where memory ran out, before anything is written. */
TQ_EXPORT int tq_attend(const struct tq_attention *steps, int64_t n);

/* A matrix in a type of ggml's, as a GGUF tensor holds it: n_rows rows of n values, row_bytes apart; a product's bias
 * [n_rows], or NULL. */
struct tq_matrix {
    const uint8_t *rows;
    const float *bias;
    int64_t type, row_bytes, n_rows, n;
};

/* Whether rows of n values of this type are multiplied and decoded here. */
TQ_EXPORT int tq_serves_rows(int64_t type, int64_t n);

/* Vectors x [n_x][n] times each of up to TQ_MAX_MATRICES matrices of the same n: outs[i] [n_x][rows of matrix i]. 0; -1
 * for other numbers, lengths or types; -2 where memory ran out. */
TQ_EXPORT int tq_products(const struct tq_matrix *matrices, int64_t n_matrices, int64_t n_x, const float *x,
                          float *const *outs);

/* A transformer layer's matrices and norms (NULL where it has none). A norm's weight is multiplied by as it is. Queries
 * and keys are turned in pairs: neighbouring values, or those half a head apart. */
enum tq_activation { TQ_SILU, TQ_GELU /* by tanh */ };

struct tq_layer {
    struct tq_matrix qkv[3], o, gate_up[2], down;
    const float *input_norm, *q_norm, *k_norm, *attention_norm, *mlp_norm, *output_norm;
    int64_t n_heads, n_kv_heads, head_dim, neighbours, activation;
    float epsilon;
};

/* What comes before attention: x [n_rows][hidden] to q, k and v [heads][n_rows][head_dim]; turns
 * [n_rows][2][head_dim / 2] are the cosines and sines of each row's angles. Errors as tq_products. */
TQ_EXPORT int tq_layer_begin(const struct tq_layer *layer, int64_t n_rows, const float *x, const float *turns, float *q,
                             float *k, float *v);

/* And after it: x as before and attention's result [n_heads][n_rows][head_dim] to out [n_rows][hidden]. */
TQ_EXPORT int tq_layer_end(const struct tq_layer *layer, int64_t n_rows, const float *x, const float *attention,
                           float *out);

/* A matrix's values to out [n_rows][n], as gguf-py has them; the bias is not looked at. 0, or -1 as above. */
TQ_EXPORT int tq_decode_rows(const struct tq_matrix *matrix, float *out);

#endif
