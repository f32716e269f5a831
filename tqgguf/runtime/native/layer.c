/* A transformer layer of a decode step but for its attention: norms, projections, RoPE before it, and what comes after.
 *
 * Everything but the products takes the caller's thread a few microseconds. */
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "tqgguf.h"

/* out = x / root mean square of x * weight, for n_rows rows of n values; out may be x. */
static void normalise(const float *x, const float *weight, float epsilon, int64_t n_rows, int64_t n, float *out)
{
    for (int64_t r = 0; r < n_rows; r++, x += n, out += n) {
        double squares[4] = {0, 0, 0, 0};
        for (int64_t i = 0; i < n; i++)
            squares[i % 4] += (double)x[i] * x[i];
        double mean = ((squares[0] + squares[1]) + (squares[2] + squares[3])) / (double)n;
        float factor = (float)(1 / sqrt(mean + epsilon));
        for (int64_t i = 0; i < n; i++)
            out[i] = x[i] * factor * weight[i];
    }
}

/* exp(x) within two units in the last place, of x cut to where both it and its inverse are normal numbers. */
static inline float exponential(float x)
{
    x = x < -87 ? -87 : x > 87 ? 87 : x;
    float whole = x * 1.44269504f + 0x1.8p23f; /* rounds: no fraction is left of so large a number */
    int32_t exponent;
    memcpy(&exponent, &whole, 4);
    whole -= 0x1.8p23f;
    float rest = x - whole * 0.693145752f - whole * 1.42860677e-6f;
    float series = 1.0f / 5040;
    for (int i = 0; i < 7; i++) {
        static const float inverse_factorials[7] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1, 1};
        series = series * rest + inverse_factorials[i];
    }
    exponent = (int32_t)((uint32_t)exponent << 23) + 0x3f800000;
    float power;
    memcpy(&power, &exponent, 4);
    return series * power;
}

/* gate = activation(gate) * up; both activations are x times a sigmoid. */
static void activate(int64_t activation, float *gate, const float *up, int64_t n)
{
    if (activation == TQ_SILU)
        for (int64_t i = 0; i < n; i++)
            gate[i] = gate[i] / (1 + exponential(-gate[i])) * up[i];
    else
        for (int64_t i = 0; i < n; i++) {
            float x = gate[i], inner = 0.797884561f * (x + 0.044715f * x * x * x);
            gate[i] = x / (1 + exponential(-2 * inner)) * up[i];
        }
}

/* Turn each pair of a head vector's values by its angle: cosines and sines of head_dim / 2 angles. */
static void turn(const struct tq_layer *layer, const float *turns, float *x)
{
    int64_t half = layer->head_dim / 2, first = layer->neighbours ? 2 : 1, second = layer->neighbours ? 1 : half;
    for (int64_t i = 0; i < half; i++) {
        float a = x[i * first], b = x[i * first + second], c = turns[i], s = turns[half + i];
        x[i * first] = a * c - b * s;
        x[i * first + second] = a * s + b * c;
    }
}

/* A projection [n_rows][n_heads][head_dim] to out [n_heads][n_rows][head_dim], normalised and turned if asked to. */
static void place_heads(const struct tq_layer *layer, const float *from, int64_t n_heads, int64_t n_rows,
                        const float *norm, const float *turns, float *out)
{
    int64_t n = layer->head_dim;
    for (int64_t h = 0; h < n_heads; h++)
        for (int64_t r = 0; r < n_rows; r++) {
            float *to = out + (h * n_rows + r) * n;
            memcpy(to, from + (r * n_heads + h) * n, (size_t)n * sizeof *to);
            if (norm != NULL)
                normalise(to, norm, layer->epsilon, 1, n, to);
            if (turns != NULL)
                turn(layer, turns + r * n, to);
        }
}

int tq_layer_begin(const struct tq_layer *layer, int64_t n_rows, const float *x, const float *turns, float *q, float *k,
                   float *v)
{
    const struct tq_matrix *m = layer->qkv;
    float *memory = malloc((size_t)(n_rows * (m[0].n + m[0].n_rows + m[1].n_rows + m[2].n_rows)) * sizeof *memory);
    if (memory == NULL)
        return -2;
    float *outs[3] = {memory + n_rows * m[0].n};
    outs[1] = outs[0] + n_rows * m[0].n_rows;
    outs[2] = outs[1] + n_rows * m[1].n_rows;
    normalise(x, layer->input_norm, layer->epsilon, n_rows, m[0].n, memory);
    int status = tq_products(m, 3, n_rows, memory, outs);
    place_heads(layer, outs[0], layer->n_heads, n_rows, layer->q_norm, turns, q);
    place_heads(layer, outs[1], layer->n_kv_heads, n_rows, layer->k_norm, turns, k);
    place_heads(layer, outs[2], layer->n_kv_heads, n_rows, NULL, NULL, v);
    free(memory);
    return status;
}

int tq_layer_end(const struct tq_layer *layer, int64_t n_rows, const float *x, const float *attention, float *out)
{
    int64_t n = layer->o.n_rows, width = layer->o.n, inner = layer->down.n, head_dim = layer->head_dim;
    float *memory = malloc((size_t)(n_rows * (width + 2 * n + 2 * inner)) * sizeof *memory);
    if (memory == NULL)
        return -2;
    float *rows = memory, *added = rows + n_rows * width, *normal = added + n_rows * n, *gate = normal + n_rows * n;
    float *outs[2] = {gate, gate + n_rows * inner};
    for (int64_t r = 0; r < n_rows; r++)
        for (int64_t h = 0; h < layer->n_heads; h++)
            memcpy(rows + r * width + h * head_dim, attention + (h * n_rows + r) * head_dim,
                   (size_t)head_dim * sizeof *rows);
    int status = tq_products(&layer->o, 1, n_rows, rows, &added);
    if (layer->attention_norm != NULL)
        normalise(added, layer->attention_norm, layer->epsilon, n_rows, n, added);
    for (int64_t i = 0; i < n_rows * n; i++)
        out[i] = x[i] + added[i];
    normalise(out, layer->mlp_norm, layer->epsilon, n_rows, n, normal);
    if (status == 0)
        status = tq_products(layer->gate_up, 2, n_rows, normal, outs);
    activate(layer->activation, gate, outs[1], n_rows * inner);
    if (status == 0)
        status = tq_products(&layer->down, 1, n_rows, gate, &added);
    if (layer->output_norm != NULL)
        normalise(added, layer->output_norm, layer->epsilon, n_rows, n, added);
    for (int64_t i = 0; i < n_rows * n; i++)
        out[i] += added[i];
    free(memory);
    return status;
}
