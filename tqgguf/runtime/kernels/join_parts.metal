  // Answers OUT [n_heads, n_rows, DIM] of a long step's rows, joined from T parts with their log-sum-exps (kernels/join_parts.py
  // says which). Rows of parts are padded to whole pages: the first that is wanted is first_row. level i: of rows whose page has
  // bit i set, [n_heads, pairs, 128 << i, DIM], its log-sum-exps [pairs, n_heads, 128 << i]; own: [n_heads, n_pages, 128, DIM],
  // [n_pages, n_heads, 128]. SINKS: logits that take part in the sum of weights and carry no value. grid: x shares of n_rows *
  // DIM / 4, y heads. A thread takes four channels of a row.
  using namespace tq;
  constexpr uint FOURS = uint(DIM / 4);
  const uint head = threadgroup_position_in_grid.y, n_heads = threadgroups_per_grid.y;
  const uint index = threadgroup_position_in_grid.x * uint(32 * SIMDGROUPS) + thread_index_in_threadgroup;
  const uint n_rows = uint(sizes[AT_n_rows]), n_pages = uint(sizes[AT_n_pages]), n_levels = uint(sizes[AT_n_levels]);
  if (index < n_rows * FOURS) {
    const uint channel = index % FOURS * 4u, row = index / FOURS + uint(sizes[AT_first_row]);
    const uint page = row / PAGE, in_page = row % PAGE, n_padded = n_pages * PAGE;
    PartSum all;
    all.maximum = -1.0e30f;
    all.sum = 0.0f;
    UNROLL for (int i = 0; i < 4; ++i) all.x[i] = 0.0f;
    const uint of_page = (page * n_heads + head) * PAGE + in_page;
    add_part(all, own + ulong((head * n_pages + page) * PAGE + in_page) * ulong(DIM) + ulong(channel), own_sums[of_page]);
    for (uint piece = 0u; piece < uint(sizes[AT_n_pieces]); ++piece) {
      const uint at = (piece * n_heads + head) * n_padded + row;
      add_part(all, pieces + ulong(at) * ulong(DIM) + ulong(channel), pieces_sums[at]);
    }
    if (sizes[AT_n_rest]) {
      const uint at = head * n_padded + row;
      add_part(all, rest + ulong(at) * ulong(DIM) + ulong(channel), rest_sums[at]);
    }
#define ADD_LEVEL(i) \
    if (uint(i) < n_levels && (page >> i & 1u)) { \
      const uint pairs = 1u << (n_levels - 1u - uint(i)), pair = page >> (i + 1), rows = PAGE << i, in_pair = row - (2u * pair + 1u) * rows; \
      add_part(all, level##i + ulong((head * pairs + pair) * rows + in_pair) * ulong(DIM) + ulong(channel), level##i##_sums[(pair * n_heads + head) * rows + in_pair]); \
    }
    ADD_LEVEL(0)
    ADD_LEVEL(1)
    ADD_LEVEL(2)
    ADD_LEVEL(3)
    ADD_LEVEL(4)
#undef ADD_LEVEL
    if (SINKS) all.sum += exp2_fast(sinks[head] * 1.4426950408889634f - all.maximum);
    const float inverse = 1.0f / all.sum;
    const uint at = (head * n_rows + index / FOURS) * uint(DIM) + channel;
    UNROLL for (int i = 0; i < 4; ++i) all.x[i] *= inverse;
    store_values<4, OUT>(out + at, all.x);
  }
