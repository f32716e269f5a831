/* Products of rows for NEON. */
#if defined(__aarch64__)

#include "lanes_neon.h"

#define SCALE(bits) tq_from_f16(bits)

#include "ggml_rows.inc"

ROW_PATH(neon)

#endif
