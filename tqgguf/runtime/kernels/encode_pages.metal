  // Whole pages of rows to blocks. grid: x pages, y KV heads. rows T [kv heads, pages * 128, DIM] in original axes; codes
  // uint8 [pages, kv heads, 128, row bytes], scales f16 [pages, kv heads, 128, groups]. CENTRED: each page's mean is taken out
  // first, and written f16 [pages, kv heads, DIM]; SCALED: what is left is multiplied by channel_scale [kv heads, DIM].
  // The first n_skipped rows (the exact prefix) become zero blocks and are left out of the mean, as are rows far outside.
  // TILED: codes as tiles have them (codes.metal), four tokens at a time.
  using namespace tq;
  typedef Part<TYPE, DIM, GROUP, 1> Row;
  constexpr int PER_LANE = DIM / 32;
  constexpr int PER_GROUP = GROUP / 32;
  constexpr float TINY = 1e-10f;  // a norm up to this counts as zero
  constexpr float LARGEST = 65504.0f;
  constexpr float FAR_OUTSIDE = 16.0f;
  constexpr float BEYOND = 3.0e38f;  // the reach of a row with a value that is not finite
  constexpr int UNIT = TILED ? 4 : 1;
  SHARED(float, mean, DIM);  // the channels' middles, until it is known
  SHARED(float, reach, CENTRED ? int(PAGE) : 1);
  SHARED(uint, counts, CENTRED ? int(PAGE) : 1);
  SHARED(uint, staged, TILED ? SIMDGROUPS * 4 * DIM / 4 : 1);  // codes of a unit, four to a word: value d of four tokens
  const uint page = threadgroup_position_in_grid.x, head = threadgroup_position_in_grid.y;
  const uint n_pages = threadgroups_per_grid.x, n_heads = threadgroups_per_grid.y;
  const uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
  const uint n_skipped = page == 0u ? uint(sizes[AT_n_skipped]) : 0u;
  const device T* page_rows = rows + (ulong(head * n_pages + page) * ulong(PAGE * uint(DIM)));

  if (CENTRED) {
    // Rows far outside are left out of the mean: those whose reach, their largest distance from the channels' middles, is above
    // FAR_OUTSIDE times the middle reach, which is to say times that of more than (n - 1) / 2 rows. Nor does a row count that is
    // not finite. Nobody can refuse it here: such values become 0.
    const uint n_rows = PAGE - n_skipped, own = uint(32 * SIMDGROUPS);
    for (uint d = thread_index_in_threadgroup; d < uint(DIM); d += own)
      mean[d] = n_rows ? lower_median(page_rows + n_skipped * uint(DIM) + d, n_rows, uint(DIM)) : 0.0f;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint token = n_skipped + simdgroup; token < PAGE; token += uint(SIMDGROUPS)) {
      float most = 0.0f;
      UNROLL for (int i = 0; i < PER_LANE; ++i) {
        const uint d = uint(i) * 32u + lane;
        const float x = float(page_rows[token * uint(DIM) + d]);
        most = metal::max(most, is_finite(x) ? metal::abs(x - mean[d]) : BEYOND);
      }
      most = simd_max(most);
      if (lane == 0u) reach[token] = most;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint token = n_skipped + thread_index_in_threadgroup; token < PAGE; token += own) {
      uint further_in = 0u;
      for (uint other = n_skipped; other < PAGE; ++other) further_in += reach[token] > FAR_OUTSIDE * reach[other] ? 1u : 0u;
      counts[token] = further_in > (n_rows - 1u) / 2u || reach[token] >= BEYOND ? 0u : 1u;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint d = thread_index_in_threadgroup; d < uint(DIM); d += own) {
      float sum = 0.0f;
      uint n_counted = 0u;
      for (uint token = n_skipped; token < PAGE; ++token) {
        if (counts[token] == 0u) continue;
        sum += float(page_rows[token * uint(DIM) + d]);
        n_counted += 1u;
      }
      const half rounded = half(n_counted ? sum * (1.0f / float(n_counted)) : 0.0f);
      mean[d] = float(rounded);
      means[(page * n_heads + head) * uint(DIM) + d] = rounded;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (uint turn = simdgroup * uint(UNIT); turn < PAGE; turn += uint(SIMDGROUPS * UNIT)) {
   uint four_codes[PER_LANE];
   for (uint token = turn; token < turn + uint(UNIT); ++token) {
    float x[PER_LANE];
    UNROLL for (int i = 0; i < PER_LANE; ++i) {
      const uint d = uint(i) * 32u + lane;
      x[i] = float(page_rows[token * uint(DIM) + d]);
      if (CENTRED) x[i] -= float(mean[d]);
      if (SCALED) x[i] *= channel_scale[head * uint(DIM) + d];
      if (token < n_skipped || !is_finite(x[i])) x[i] = 0.0f;
    }
    uint code[PER_LANE];
    float scale[PER_LANE / PER_GROUP];
    if (has_table(TYPE) && TYPE != Q4_0) {
      float norm[PER_LANE / PER_GROUP];
      UNROLL for (int g = 0; g < PER_LANE / PER_GROUP; ++g) {
        float squares = 0.0f;
        UNROLL for (int i = g * PER_GROUP; i < (g + 1) * PER_GROUP; ++i) squares += x[i] * x[i];
        norm[g] = metal::sqrt(simd_sum(squares));
        const float inverse = norm[g] > TINY ? 1.0f / norm[g] : 0.0f;
        UNROLL for (int i = g * PER_GROUP; i < (g + 1) * PER_GROUP; ++i) x[i] *= inverse;
      }
      rotate<PER_LANE, ROTATION>(x, signs, lane);
      UNROLL for (int g = 0; g < PER_LANE / PER_GROUP; ++g) {
        float squares = 0.0f;
        UNROLL for (int i = g * PER_GROUP; i < (g + 1) * PER_GROUP; ++i) {
          code[i] = 0u;  // the number of boundaries that are not above the value
          UNROLL for (int b = 0; b < (1 << (low_bits(TYPE) + high_bits(TYPE))) - 1; ++b) code[i] += x[i] >= boundaries[b] ? 1u : 0u;
          const float chosen = book[code[i]];
          squares += chosen * chosen;
        }
        const float length = metal::sqrt(simd_sum(squares));
        scale[g] = metal::min(length > TINY ? norm[g] / length : norm[g], LARGEST);
      }
    } else {
      rotate<PER_LANE, ROTATION>(x, signs, lane);
      UNROLL for (int i = 0; i < PER_LANE; ++i) {
        const float most = simd_max(metal::abs(x[i]));
        float d = most / 127.0f;
        if (TYPE == Q4_0) {  // the first value of largest magnitude becomes -8
          const uint first = simd_min(metal::abs(x[i]) == most ? lane : 32u);
          d = simd_shuffle(x[i], ushort(first & 31u)) / -8.0f;
          if (most == 0.0f) d = 0.0f;
        }
        const float inverse = metal::abs(d) > 2.938736e-39f ? 1.0f / d : 0.0f;  // 0 where 1 / d would be infinite
        if (TYPE == Q4_0) {
          code[i] = metal::min(uint(metal::max(x[i] * inverse + 8.5f, 0.0f)), 15u);
        } else {
          const float q = x[i] * inverse;
          code[i] = uint(int(q + (q < 0.0f ? -0.49999997f : 0.49999997f))) & 255u;  // half away from zero
        }
        scale[i / PER_GROUP] = metal::max(metal::min(d, LARGEST), -LARGEST);
      }
    }

    const ulong row = ulong((page * n_heads + head) * PAGE + token);
    if (lane == 0u) {
      UNROLL for (int g = 0; g < PER_LANE / PER_GROUP; ++g) scales[row * ulong(PER_LANE / PER_GROUP) + ulong(uint(g))] = half(scale[g]);
    }
    if (TILED) {
      UNROLL for (int i = 0; i < PER_LANE; ++i) four_codes[i] = (token == turn ? 0u : four_codes[i]) | (code[i] << (8u * (token - turn)));
      continue;
    }
    // Words of codes: what neighbouring lanes hold is joined by shuffles, the first of them writes.
    device uint* words = (device uint*)codes + row * ulong(uint(Row::row_bytes / 4));
    UNROLL for (int i = 0; i < PER_LANE; ++i) {
      constexpr int low = low_bits(TYPE);
      constexpr uint per_word = uint(32 / low);
      const uint group = uint(i / PER_GROUP * Row::group_bytes / 4), in_group = uint(i % PER_GROUP);
      uint word = code[i] & ((1u << low) - 1u);
      if (TYPE == Q4_0) {
        word |= simd_shuffle_xor(word, ushort(16)) << 4;  // values j and j + 16
        word = (word & 255u) << (8u * (lane % 4u));
        word |= simd_shuffle_xor(word, ushort(1));
        word |= simd_shuffle_xor(word, ushort(2));
        if (lane < 16u && lane % 4u == 0u) words[group + lane / 4u] = word;
      } else {
        word <<= uint(low) * (lane % per_word);
        UNROLL for (int mask = 1; mask < 32 / low; mask *= 2) word |= simd_shuffle_xor(word, ushort(mask));
        if (lane % per_word == 0u) words[group + in_group * uint(low) + lane / per_word] = word;
      }
      if (high_bits(TYPE)) {
        uint high = (code[i] >> low) << lane;
        UNROLL for (int mask = 1; mask < 32; mask *= 2) high |= simd_shuffle_xor(high, ushort(mask));
        if (lane == 0u) words[group + uint(Row::low / 4) + in_group] = high;
      }
    }
   }
   if (TILED) {
    typedef Tile<TYPE, DIM, GROUP> tile;
    const uint at = simdgroup * uint(DIM);
    UNROLL for (int i = 0; i < PER_LANE; ++i) staged[at + uint(i) * 32u + lane] = four_codes[i];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    device uint* words = (device uint*)(codes + (ulong(page * n_heads + head) * ulong(8u) + ulong(turn / 16u)) * ulong(uint(tile::tile_bytes)));
    for (uint i = lane; i < uint(tile::groups * 8 * tile::words); i += 32u) {
      const uint w = i % uint(tile::words), part = i / uint(tile::words) % 8u, group = i / uint(8 * tile::words);
      const uint first = at + group * uint(GROUP) + part * uint(GROUP / 8);
      uint word = 0u;
      const uint block = tile::width == 6 ? w / 3u * 16u : 0u, pairs_before = tile::width == 6 ? block + w % 3u * 4u : w * uint(tile::per_word);
      for (uint k = 0; k < uint(tile::per_word); ++k) {
        for (uint rest = 0; rest < (tile::width == 6 ? 2u : 1u); ++rest) {  // then two bits of one of the last four pairs
          const uint pair = rest ? block + 12u + k : pairs_before + k, four = uint(staged[first + pair / 4u * 2u + pair % 2u]) >> (16u * (pair / 2u % 2u));
          const uint entry = entry_of_codes<TYPE>(four & 255u, (four >> 8) & 255u);
          word |= (rest ? ((entry >> (2u * (w % 3u))) & 3u) << 6 : entry) << (uint(tile::spacing) * k);
        }
      }
      words[group * uint(tile::group_words) + tile::place(4u * part + turn / 4u % 4u, w)] = word;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
   }
  }
