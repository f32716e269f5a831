/* Products of rows for AVX-512. */
#if defined(__x86_64__)

#include "lanes_avx512.h"

#define SCALE(bits) _cvtsh_ss(bits)

INLINE struct tables code_tables(int zero)
{
    const __m512 codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512 low = codes - v_set1((float)zero);
    return (struct tables){low, low + v_set1(16)};
}

#define CODE_TABLES(zero) code_tables(zero)

#include "ggml_rows.inc"

ROW_PATH(avx512)

#endif
