  // A matrix [M, N] of ggml's blocks, row after row as in a file, to the planes of matrix_fields.metal: the same bits in another order
  // (signed bytes with their sign bit turned over). A simdgroup a step; rows beyond the last are the last again.
  using namespace tq;
  const uint n_tiles = uint(sizes[AT_n_tiles]), n_steps = uint(sizes[AT_n_steps]), last = uint(sizes[AT_n_rows]) - 1u;
  const uint place = thread_index_in_simdgroup, g = place >> 2, t = place & 3u, n_all = n_tiles * n_steps;
  const uint step = threadgroup_position_in_grid.x * uint(SIMDGROUPS) + simdgroup_index_in_threadgroup;
  if (step < n_all) {
    const uint tile = step / n_steps, in_row = step % n_steps;
    const ulong row_bytes = ulong(n_steps) * ulong(64 / values_of_block(TYPE) * bytes_of_block(TYPE));
    constexpr uint PER_BLOCK = uint(steps_of_block(TYPE));
    const ulong bytes_of_row = PER_BLOCK > 1u ? ulong(n_steps / PER_BLOCK) * ulong(bytes_of_block(TYPE)) : row_bytes;
    uint low[4], high[4], twos[2], ones = 0u;
    UNROLL for (int j = 0; j < 4; ++j) {
      low[j] = high[j] = 0u;
      if (j < 2) twos[j] = 0u;
    }
    for (uint i = 0u; i < 32u; ++i) {
      const uint j = i >> 3, e = i & 7u, reg = e >> 1, second = e & 1u;
      const uint row = metal::min(tile * 16u + g + 8u * (reg & 1u), last), column = in_row * 64u + 16u * j + 4u * t + 2u * (reg >> 1) + second;
      const device uchar* block = blocks + ulong(row) * bytes_of_row + ulong(column / uint(values_of_block(TYPE))) * ulong(bytes_of_block(TYPE));
      const uint code = code_of<TYPE>(block, column % uint(values_of_block(TYPE)));
      const uint rest = nibbles_of(TYPE) ? code >> 4 : code;
      UNROLL for (uint k = 0u; k < 4u; ++k) {
        if (k == j) low[k] |= (code & 15u) << (has_values(TYPE) ? 8u * reg + 4u * second : 16u * second + 4u * reg);
        if (k == j) high[k] |= (rest & 15u) << (16u * second + 4u * reg);
        if (k < 2u && k == j >> 1) twos[k & 1u] |= (rest & 3u) << (16u * second + 2u * (4u * (j & 1u) + reg));
      }
      ones |= (has_twos(TYPE) ? rest >> 2 & 1u : rest & 1u) << (16u * second + 4u * j + reg);
    }
    device uint* rest = planes + ulong(n_all) * ulong(low_words(TYPE));
    UNROLL for (uint j = 0u; j < 4u; ++j) {
      if (nibbles_of(TYPE) > 0) planes[ulong(step * 32u + place) * 4ul + ulong(j)] = low[j];
      if (nibbles_of(TYPE) > 1) planes[ulong(n_all) * 128ul + ulong(step * 32u + place) * 4ul + ulong(j)] = high[j];
      if (has_twos(TYPE) && j < 2u) rest[ulong(step * 32u + place) * 2ul + ulong(j)] = twos[j & 1u];
    }
    if (has_ones(TYPE)) rest[ulong(n_all) * ulong(twos_words(TYPE)) + ulong(step * 32u + place)] = ones;
    // Scales: words of a block shared out among its steps.
    constexpr uint WORDS = uint(scale_words(TYPE)), OF_STEP = WORDS / PER_BLOCK, SECOND = uint(second_words(TYPE)), SECOND_OF_STEP = SECOND / PER_BLOCK;
    device uint* scales = planes + ulong(n_all) * ulong(code_words(TYPE));
    const uint block_index = step / PER_BLOCK, in_block = in_row / PER_BLOCK;
    const ulong block_at = ulong(in_block * uint(PER_BLOCK > 1u ? 1 : 64 / values_of_block(TYPE))) * ulong(bytes_of_block(TYPE));
    if (place < OF_STEP) {
      const uint word = (step % PER_BLOCK) * OF_STEP + place;
      const uint row = metal::min(tile * 16u + row_of_scale<TYPE>(word), last);
      uint found = scale_word<TYPE>(blocks + ulong(row) * bytes_of_row + block_at, word);
      if (TYPE == MXFP4) {
        const uint lower = metal::min(tile * 16u + word + 8u, last);
        found |= scale_word<TYPE>(blocks + ulong(lower) * bytes_of_row + block_at, word) << 16;
      }
      scales[ulong(block_index) * ulong(WORDS) + ulong(word)] = found;
    }
    if (place < SECOND_OF_STEP) {
      const uint word = (step % PER_BLOCK) * SECOND_OF_STEP + place;
      scales += ulong(n_all / PER_BLOCK) * ulong(WORDS) + ulong(block_index) * ulong(SECOND);
      const uint first = TYPE == Q2_K ? word >> 1 : word;
      const device uchar* block = blocks + block_at;
      const ulong upper = ulong(metal::min(tile * 16u + first, last)) * bytes_of_row, lower = ulong(metal::min(tile * 16u + first + 8u, last)) * bytes_of_row;
      constexpr uint AT = uint(TYPE == Q2_K ? 80 : TYPE == Q3_K ? 108 : 208);
      if (TYPE == Q2_K) {
        const device uchar* mine = block + (word & 1u ? lower : upper) + AT;
        scales[word] = half_at(mine) | half_at(mine + 2) << 16;
      } else {
        scales[word] = half_at(block + upper + AT) | half_at(block + lower + AT) << 16;
      }
    }
  }
