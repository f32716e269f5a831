/* The rotation of single vectors; see rotate.c. */
#ifndef TQ_ROTATE_H
#define TQ_ROTATE_H

#include "tqgguf.h"

/* x[head_dim] into the codec's rotated domain, in place; inverse: out of it. */
void tq_rotate(const struct tq_codec *codec, float *x, int inverse);

#endif
