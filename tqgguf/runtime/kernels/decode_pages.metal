  // Rows out T [heads, n_tokens, DIM], or [n_tokens, heads, DIM] if TOKENS_FIRST: n_coded from blocks, from position `start` on
  // (a page's edge), then position[0] f16 rows of `own` from own_first on, which has n_own of each head (0: as many as are
  // read), then n_zeros zero rows. The exact prefix comes from its own rows. UNROTATED: in original axes, else as blocks have
  // them (then neither SCALED nor CENTRED). grid: x shares of tokens, y KV heads from first_head on. A simdgroup takes eight rows
  // at a time (page_rows.metal).
  using namespace tq;
  typedef Part<TYPE, DIM, GROUP, 1> Row;
  constexpr int SPAN = larger(ROTATION, 32), EIGHTS = SPAN / 32, PER_LANE = 8 * EIGHTS;
  constexpr bool TURN = UNROTATED && ROTATION > 1;
  const uint out_head = threadgroup_position_in_grid.y, head = uint(sizes[AT_first_head]) + out_head, n_heads = uint(sizes[AT_n_heads]);
  const uint lane = thread_index_in_simdgroup, part = lane % 4u, start = uint(sizes[AT_start]), n_prefix = uint(sizes[AT_n_prefix]);
  const uint n_coded = uint(sizes[AT_n_coded]), own_end = n_coded + uint(position[0]), n_tokens = own_end + uint(sizes[AT_n_zeros]);
  const uint n_own = uint(sizes[AT_n_own]) ? uint(sizes[AT_n_own]) : uint(position[0]);
  const float value_of_code = book[lane % 16u];
  // Factors before the transform, and after it; channels' scales, and their reciprocals.
  SHARED(float, factors, 2 * SPAN + 2 * DIM);
  const uint thread_index = simdgroup_index_in_threadgroup * 32u + lane;
  if (TURN) {
    for (uint i = thread_index; i < uint(SPAN); i += uint(32 * SIMDGROUPS)) {
      factors[i] = signs[uint(SPAN) + i];
      factors[uint(SPAN) + i] = signs[i];
    }
  }
  if (SCALED) {
    for (uint i = thread_index; i < uint(DIM); i += uint(32 * SIMDGROUPS)) {
      const float scale = channel_scale[head * uint(DIM) + i];
      factors[uint(2 * SPAN) + i] = scale;
      factors[uint(2 * SPAN + DIM) + i] = 1.0f / scale;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint stride = threadgroups_per_grid.x * uint(SIMDGROUPS) * 8u;
  for (uint first = (threadgroup_position_in_grid.x * uint(SIMDGROUPS) + simdgroup_index_in_threadgroup) * 8u; first < n_tokens; first += stride) {
    const uint token = first + lane / 4u, key = start + token, page = key / PAGE - uint(sizes[AT_codes_page]);
    const bool coded = token < n_coded && key >= n_prefix;
    const ulong row = ulong((page * n_heads + head) * PAGE + key % PAGE);
    // of the row, or of the tile that it lies in
    const device uchar* row_codes = (const device uchar*)codes + (TILED ? row - ulong(key % 16u) : row) * ulong(uint(Row::row_bytes));
    UNROLL for (int span = 0; span < DIM / SPAN; ++span) {
      float x[PER_LANE];
      UNROLL for (int c = 0; c < EIGHTS; ++c) {
        const uint d = uint(span * SPAN + c * 32) + part * 8u, group = d / uint(GROUP);
        uint found[8];
        float scale = 0.0f;
        UNROLL for (int i = 0; i < 8; ++i) found[i] = 0u;
        if (coded) {
          if (TILED) {
            codes_of_tile<TYPE, DIM, GROUP>((const device uint*)row_codes + group * uint(Tile<TYPE, DIM, GROUP>::group_words), d % uint(GROUP), key % 16u, found);
          } else {
            codes_of_row<TYPE, DIM, GROUP>(row_codes + group * uint(Row::group_bytes), d % uint(GROUP), found);
          }
          scale = float(scales[row * ulong(uint(Row::groups)) + ulong(group)]);
        }
        UNROLL for (int i = 0; i < 8; ++i) {
          const float value = TYPE == Q8_0 ? float(int(found[i] << 24) >> 24) : simd_shuffle(value_of_code, ushort(found[i]));
          x[8 * c + i] = (TYPE == Q4_0 ? value * scale_factor(TYPE) : value) * scale;
        }
      }
      if (TURN) {
        UNROLL for (int i = 0; i < PER_LANE; ++i) x[i] = times(x[i], factors[uint(i / 8 * 32 + i % 8) + part * 8u]);
        hadamard_of_four_lanes<SPAN>(x, lane);
        UNROLL for (int i = 0; i < PER_LANE; ++i) x[i] = times(x[i], factors[uint(SPAN + i / 8 * 32 + i % 8) + part * 8u]);
      }
      const ulong place = TOKENS_FIRST ? ulong(token) * ulong(threadgroups_per_grid.y) + ulong(out_head) : ulong(out_head) * ulong(n_tokens) + ulong(token);
      UNROLL for (int c = 0; c < EIGHTS; ++c) {
        const uint d = uint(span * SPAN + c * 32) + part * 8u;
        thread float* eight = x + 8 * c;
        float other[8];
        if (coded) {
          if (SCALED) {
            UNROLL for (int i = 0; i < 8; ++i)
              eight[i] = divided(eight[i], factors[uint(2 * SPAN + i) + d], factors[uint(2 * SPAN + DIM + i) + d]);
          }
          if (CENTRED) {
            load_halves(page_means + (page * n_heads + head) * uint(DIM) + d, other);
            UNROLL for (int i = 0; i < 8; ++i) eight[i] += other[i];
          }
        } else if (token < n_coded) {
          load_halves(prefix + (head * n_prefix + key) * uint(DIM) + d, eight);
        } else if (token < own_end) {
          load_halves(own + ulong(head * n_own + uint(sizes[AT_own_first]) + token - n_coded) * ulong(DIM) + ulong(d), eight);
        }
        if (token < n_tokens) store_values<8, T>(out + place * ulong(DIM) + ulong(d), eight);
      }
    }
  }
