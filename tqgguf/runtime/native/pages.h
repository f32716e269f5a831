/* Scales of a tile as attention and decoding read them. */
#ifndef TQ_PAGES_H
#define TQ_PAGES_H

#include "path.h"

static inline int tq_row_scales(const struct tq_codec *codec)
{
    return codec->n_scales == 0 ? 0 : codec->head_dim / codec->block_size * codec->n_scales;
}

/* f16 scales of n_rows rows, n_scales each, to factors[i * TQ_PAGE + row]. */
void tq_load_scales(const struct tq_path *path, const uint16_t *scales, int n_rows, int n_scales, float *factors);

#endif
