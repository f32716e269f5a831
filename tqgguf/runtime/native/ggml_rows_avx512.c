/* Products of rows for AVX-512. */
#if defined(__x86_64__)

#include "lanes_avx512.h"

#define SCALE(bits) _cvtsh_ss(bits)

#include "ggml_rows.inc"

ROW_PATH(avx512)

#endif
