/* The Walsh-Hadamard rotation of queries and outputs, as tqgguf/formats/blocks/rotation.py states it. Encoding has its own
 * form of it (encode.inc), for many rows side by side. */
#include "rotate.h"

#include <string.h>

/* Butterflies of half-widths 1 and 2 within each four values, then the wider ones. */
static void transform(float *restrict x, int size)
{
    for (int i = 0; i < size; i += 4) {
        float a = x[i] + x[i + 1], b = x[i] - x[i + 1], c = x[i + 2] + x[i + 3], d = x[i + 2] - x[i + 3];
        x[i] = a + c;
        x[i + 1] = b + d;
        x[i + 2] = a - c;
        x[i + 3] = b - d;
    }
    for (int half = 4; half < size; half *= 2)
        for (int start = 0; start < size; start += 2 * half) {
            float *restrict low = x + start, *restrict high = x + start + half;
            for (int i = 0; i < half; i++) {
                float a = low[i], b = high[i];
                low[i] = a + b;
                high[i] = a - b;
            }
        }
}

void tq_rotate(const struct tq_codec *codec, float *x, int inverse)
{
    int size = codec->rotation;
    const float *before = codec->signs[inverse ? 1 : 0], *after = codec->signs[inverse ? 0 : 1];
    if (size == 0)
        return;
    for (float *part = x; part < x + codec->head_dim; part += size) {
        for (int i = 0; i < size && codec->is_turbo; i++)
            part[i] *= before[i];
        transform(part, size);
        for (int i = 0; i < size; i++)
            part[i] *= codec->is_turbo ? after[i] * codec->rotation_factor : codec->rotation_factor;
    }
}
