/* Products of rows in plain C. */
#include "lanes_portable.h"

#define SCALE(bits) tq_from_f16(bits)

#include "ggml_rows.inc"

ROW_PATH(portable)
