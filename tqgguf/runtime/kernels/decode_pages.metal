  // Rows out T [heads, n_tokens, DIM], or [n_tokens, heads, DIM] if TOKENS_FIRST: n_coded from blocks, from position `start` on
  // (a page's edge), then position[0] f16 rows of `own` from own_first on, which has n_own of each head (0: as many as are
  // read), then n_zeros zero rows. The exact prefix comes from its own rows. UNROTATED: in original axes, else as blocks have
  // them (then neither SCALED nor CENTRED). grid: x shares of tokens, y KV heads from first_head on. A simdgroup takes a row at
  // a time.
  using namespace tq;
  typedef Part<TYPE, DIM, GROUP, 1> Row;
  constexpr int PER_LANE = DIM / 32;
  const uint out_head = threadgroup_position_in_grid.y, head = uint(sizes[AT_first_head]) + out_head, n_heads = uint(sizes[AT_n_heads]);
  const uint lane = thread_index_in_simdgroup, start = uint(sizes[AT_start]);
  const uint n_coded = uint(sizes[AT_n_coded]), own_end = n_coded + uint(position[0]), n_tokens = own_end + uint(sizes[AT_n_zeros]);
  const uint n_own = uint(sizes[AT_n_own]) ? uint(sizes[AT_n_own]) : uint(position[0]);
  const uint stride = threadgroups_per_grid.x * uint(SIMDGROUPS);
  for (uint token = threadgroup_position_in_grid.x * uint(SIMDGROUPS) + simdgroup_index_in_threadgroup; token < n_tokens; token += stride) {
    const uint key = start + token;
    float x[PER_LANE];
    if (token >= own_end) {
      UNROLL for (int i = 0; i < PER_LANE; ++i) x[i] = 0.0f;
    } else if (token >= n_coded) {
      const uint row = head * n_own + uint(sizes[AT_own_first]) + token - n_coded;
      UNROLL for (int i = 0; i < PER_LANE; ++i) x[i] = float(own[ulong(row) * ulong(DIM) + ulong(uint(i) * 32u + lane)]);
    } else if (key < uint(sizes[AT_n_prefix])) {
      const uint row = head * uint(sizes[AT_n_prefix]) + key;
      UNROLL for (int i = 0; i < PER_LANE; ++i) x[i] = float(prefix[row * uint(DIM) + uint(i) * 32u + lane]);
    } else {
      const uint page = key / 128u - uint(sizes[AT_codes_page]);
      const ulong row = ulong((page * n_heads + head) * 128u + key % 128u);
      // of the row, or of the tile that it lies in
      const device uchar* row_codes = (const device uchar*)codes + (TILED ? row - ulong(key % 16u) : row) * ulong(uint(Row::row_bytes));
      UNROLL for (int i = 0; i < PER_LANE; ++i) {
        const uint d = uint(i) * 32u + lane, group = d / uint(GROUP), value = d % uint(GROUP);
        const device uchar* group_codes = row_codes + group * uint(Row::group_bytes);
        constexpr uint low = uint(low_bits(TYPE));
        if (TILED) {
          typedef Tile<TYPE, DIM, GROUP> tile;
          const uint part = value / uint(GROUP / 8), in_tile = key % 16u;
          const uint pair = value % uint(GROUP / 8) / 2u * 4u + in_tile / 2u % 2u * 2u + value % 2u, slot = 4u * part + in_tile / 4u;
          const device uint* words = (const device uint*)row_codes + group * uint(tile::group_words);
          x[i] = book[code_of_entry<TYPE>(tile_entry<tile>(words, slot, pair), int(in_tile % 2u))];
        } else if (TYPE == Q8_0) {
          x[i] = float(int(uint(group_codes[value]) << 24) >> 24);
        } else if (TYPE == Q4_0) {
          x[i] = book[(uint(group_codes[value % 16u]) >> (value / 16u * 4u)) & 15u] * scale_factor(TYPE);
        } else {
          uint code = (uint(group_codes[value * low / 8u]) >> (value * low % 8u)) & ((1u << low) - 1u);
          if (high_bits(TYPE)) code |= ((uint(group_codes[uint(Row::low) + value / 8u]) >> (value % 8u)) & 1u) << low;
          x[i] = book[code];
        }
        x[i] *= float(scales[row * ulong(uint(Row::groups)) + ulong(group)]);
      }
      if (UNROTATED) unrotate<PER_LANE, ROTATION>(x, signs, lane);
      UNROLL for (int i = 0; i < PER_LANE; ++i) {
        const uint d = uint(i) * 32u + lane;
        if (SCALED) x[i] /= channel_scale[head * uint(DIM) + d];
        if (CENTRED) x[i] += float(page_means[(page * n_heads + head) * uint(DIM) + d]);
      }
    }
    const ulong place = TOKENS_FIRST ? ulong(token) * ulong(threadgroups_per_grid.y) + ulong(out_head) : ulong(out_head) * ulong(n_tokens) + ulong(token);
    UNROLL for (int i = 0; i < PER_LANE; ++i) out[place * ulong(DIM) + ulong(uint(i) * 32u + lane)] = T(x[i]);
  }
