/* Products of rows for AVX2. */
#if defined(__x86_64__)

#include "lanes_avx2.h"

#define SCALE(bits) _cvtsh_ss(bits)

#include "ggml_rows.inc"

ROW_PATH(avx2)

#endif
