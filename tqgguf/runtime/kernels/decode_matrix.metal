  // Rows of a matrix [M, N] of ggml's blocks as T, rounded once: out [rows, N]. IDS: those that `ids` numbers, one a threadgroup; else those from first_row on, a
  // multiple of 16, a tile a threadgroup. Simdgroups take turns over a block's steps. TYPE: of matrix_fields.metal.
  using namespace tq;
  const uint lane = thread_index_in_simdgroup, g = lane >> 2, t = lane & 3u, at = threadgroup_position_in_grid.x;
  const uint n_rows = uint(sizes[AT_n_rows]), n_tiles = uint(sizes[AT_n_tiles]), n_steps = uint(sizes[AT_n_steps]);
  const uint id = IDS ? uint(ids[at]) : 0u, tile = IDS ? id / 16u : uint(sizes[AT_first_row]) / 16u + at;
  constexpr int PER_BLOCK = steps_of_block(TYPE);
  uint out_rows[2];
  bool is_wanted[2];
  UNROLL for (int h = 0; h < 2; ++h) {
    const uint row = tile * 16u + g + 8u * uint(h);
    out_rows[h] = IDS ? at : row - uint(sizes[AT_first_row]);
    is_wanted[h] = IDS ? row == id : out_rows[h] < n_rows;
  }
  for (uint unit = simdgroup_index_in_threadgroup * uint(PER_BLOCK); unit < n_steps; unit += uint(SIMDGROUPS * PER_BLOCK)) {
    const uint step = tile * n_steps + unit;
    Codes codes[PER_BLOCK];
    BlockScales scales;
    CodePlaces<TYPE> places;
    places.start(weight, n_tiles * n_steps, step, lane);
    UNROLL for (int s = 0; s < PER_BLOCK; ++s) places.load(s, codes[s]);
    load_scales<TYPE>(weight, n_tiles * n_steps, step / uint(PER_BLOCK), g, scales);
    UNROLL for (int s = 0; s < PER_BLOCK; ++s) {
      UNROLL for (int two = 0; two < 2; ++two) {
        UNROLL for (int h = 0; h < 2; ++h) {
          uint2 of_run[2];
          UNROLL for (int r = 0; r < 2; ++r) {
            const int j = 2 * two + r;
            float scale, minimum, x[4];
            scale_of<TYPE>(scales, s, j, h, UP, scale, minimum);
            UNROLL for (int e = 0; e < 4; ++e) {
              const int i = h + 2 * (e >> 1), down = 16 * (e & 1);
              const uint code = code_pair<TYPE>(codes[s], j, i, 0u) >> down & 0xffffu;
              if (has_values(TYPE)) {
                x[e] = scale * float(table_number(TYPE, pair_in_table(codes[s], j, i) >> (4 * (e & 1)) & 15u));
              } else {
                const uint high = nibbles_of(TYPE) > 1 ? high_pair(codes[s], j, i, 0u) >> down & 0xffffu : 0u;
                const float number = float(int(code + 16u * high) - zero_of(TYPE) * (nibbles_of(TYPE) > 1 ? 16 : 1));
                x[e] = has_minimum(TYPE) ? times(scale, number) + minimum : scale * number;
              }
            }
            of_run[r].x = value_pair<T>(x[0], x[1]);
            of_run[r].y = value_pair<T>(x[2], x[3]);
          }
          // A lane has four values of each of two runs, and with its neighbour's eight of one.
          const uint first = simd_shuffle_xor(t & 1u ? of_run[0].x : of_run[1].x, 1), second = simd_shuffle_xor(t & 1u ? of_run[0].y : of_run[1].y, 1);
          uint4 eight;
          eight.x = t & 1u ? first : of_run[0].x;
          eight.y = t & 1u ? second : of_run[0].y;
          eight.z = t & 1u ? of_run[1].x : first;
          eight.w = t & 1u ? of_run[1].y : second;
          const uint column = (unit + uint(s)) * 64u + 16u * (uint(2 * two) + (t & 1u)) + 8u * (t >> 1);
          if (is_wanted[h]) *(device uint4*)(out + ulong(out_rows[h]) * ulong(n_steps * 64u) + ulong(column)) = eight;
        }
      }
    }
  }
