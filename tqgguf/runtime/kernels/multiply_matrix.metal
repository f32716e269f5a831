  // T [n_rows, N] times a matrix [M, N] of ggml's blocks: out OUT [n_rows, M], sums in float. TILES tiles of 16 rows of the matrix a
  // threadgroup, COLUMNS tiles of 8 rows of x; its simdgroups take turns over STEPS steps of 64 columns at a time. MATRIX_TILES, MATRIX_STEPS: the whole matrix's. TYPE: of
  // matrix_fields.metal. ADDED: `added`, a float type [n_rows, M] or, where its stride is 0, [M], is added
  // before it is rounded. NORM: x is one row and has its RMS norm taken first, rounded to T, with weights `norm`, f32 [N + 1], the last
  // of which is epsilon. GATE: 1 for silu, 2 for gelu by tanh: tiles lie in
  // pairs, gate and up, and out [n_rows, M / 2] is the gate's activation times up.
  using namespace tq;
  const uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup, index = thread_index_in_threadgroup;
  const uint g = row_of(lane), place = 4u * g + pair_of(lane);
  // The matrix's sizes are constants: what it holds is asked for before anything else has come from memory.
  constexpr uint n_tiles = uint(MATRIX_TILES), n_steps = uint(MATRIX_STEPS);
  const uint n_rows = uint(sizes[AT_n_rows]), first_tile = threadgroup_position_in_grid.x * uint(TILES);
  constexpr int RUNS = runs_of_group(TYPE), GROUPS = 4 / RUNS;
  constexpr int PER_BLOCK = steps_of_block(TYPE);
  SHARED(uint, table, has_values(TYPE) ? TABLE_PAIRS : 8);
  if (has_values(TYPE)) {
    fill_table<TYPE, T>(table, index, uint(32 * SIMDGROUPS));
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  SHARED(uint, normed, NORM ? MATRIX_STEPS * 32 : 8);
  if (NORM) {
    SHARED(float, squares, SIMDGROUPS);
    norm_row<T>(x, norm, n_steps * 32u, index, uint(32 * SIMDGROUPS), squares, normed);
  }
  Columns<T> columns[COLUMNS];
  UNROLL for (int c = 0; c < COLUMNS; ++c) columns[c].start(x, n_steps * 64u, n_rows, 8u * uint(c), lane);
  float sum[TILES][COLUMNS][4];
  UNROLL for (int i = 0; i < TILES; ++i)
    UNROLL for (int c = 0; c < COLUMNS; ++c)
      UNROLL for (int e = 0; e < 4; ++e) sum[i][c][e] = 0.0f;
  const uint up = opaque(UP), over = opaque(base_pair<T>());
  const float base = has_values(TYPE) ? 0.0f : base_of<T>();
  uint zero[4], ones[4];
  UNROLL for (int e = 0; e < 4; ++e) {
    zero[e] = same_pair<T>(-base - float(nibbles_of(TYPE) > 1 ? 0 : zero_of(TYPE)));
    ones[e] = ones_pair<T>();
  }
  for (uint unit = simdgroup * uint(STEPS); unit < n_steps; unit += uint(SIMDGROUPS * STEPS)) {
    Unit<TYPE, TILES, STEPS> now;
    now.load(weight, n_tiles, n_steps, first_tile, unit, place);
    if (!NORM && lane / 4u < n_rows) ask_for(x + ulong(lane / 4u) * ulong(n_steps * 64u) + ulong(unit * 64u + lane % 4u * uint(STEPS * 16)));
    UNROLL for (int c = 0; c < COLUMNS; ++c) columns[c].go_to(unit * 64u);
    UNROLL for (int s = 0; s < STEPS; ++s) {
      UNROLL for (int group = 0; group < GROUPS; ++group) {
        uint b[COLUMNS][RUNS][2];
        float of_ones[COLUMNS][4];
        UNROLL for (int c = 0; c < COLUMNS; ++c) {
          UNROLL for (int e = 0; e < 4; ++e) of_ones[c][e] = 0.0f;
          UNROLL for (int r = 0; r < RUNS; ++r) {
            if (NORM)
              read_normed(normed, unit * 32u + uint(32 * s + 8 * (group * RUNS + r)), lane, b[c][r]);
            else
              columns[c].read(64 * s + 16 * (group * RUNS + r), b[c][r]);
            if (has_minimum(TYPE)) multiply_pairs<T>(of_ones[c], ones, b[c][r]);
          }
        }
        UNROLL for (int i = 0; i < TILES; ++i) {
          uint a[RUNS][4], high[RUNS][4];
          UNROLL for (int r = 0; r < RUNS; ++r) {
            UNROLL for (int e = 0; e < 4; ++e) {
              const int run = group * RUNS + r;
              a[r][e] = has_values(TYPE) ? uint(table[pair_in_table(now.codes[i][s], run, e)]) : code_pair<TYPE>(now.codes[i][s], run, e, over);
              if (nibbles_of(TYPE) > 1) high[r][e] = high_pair(now.codes[i][s], run, e, over);
            }
          }
          float scale[2], minimum[2];
          UNROLL for (int h = 0; h < 2; ++h) {
            scale_of<TYPE>(now.scales[i][s / PER_BLOCK], s % PER_BLOCK, group * RUNS, h, up, scale[h], minimum[h]);
            if (has_minimum(TYPE)) minimum[h] = multiply_add(-base, scale[h], minimum[h]);
          }
          UNROLL for (int c = 0; c < COLUMNS; ++c) {
            float found[4];
            UNROLL for (int e = 0; e < 4; ++e) found[e] = 0.0f;
            if (nibbles_of(TYPE) > 1) {
              uint less[4];
              UNROLL for (int e = 0; e < 4; ++e) less[e] = same_pair<T>(-base - float(zero_of(TYPE)));
              UNROLL for (int r = 0; r < RUNS; ++r) multiply_pairs<T>(found, less, b[c][r]);
              UNROLL for (int r = 0; r < RUNS; ++r) multiply_pairs<T>(found, high[r], b[c][r]);
              UNROLL for (int e = 0; e < 4; ++e) found[e] *= 16.0f;
            }
            if (!has_minimum(TYPE) && !has_values(TYPE))
              UNROLL for (int r = 0; r < RUNS; ++r) multiply_pairs<T>(found, zero, b[c][r]);
            UNROLL for (int r = 0; r < RUNS; ++r) multiply_pairs<T>(found, a[r], b[c][r]);
            UNROLL for (int e = 0; e < 4; ++e) {
              sum[i][c][e] = multiply_add(scale[e >> 1], found[e], sum[i][c][e]);
              if (has_minimum(TYPE)) sum[i][c][e] = multiply_add(minimum[e >> 1], of_ones[c][e], sum[i][c][e]);
            }
          }
        }
      }
    }
  }
  constexpr uint OF_TILE = uint(128 * COLUMNS);
  SHARED(float, parts, SIMDGROUPS * TILES * COLUMNS * 128);
  UNROLL for (int i = 0; i < TILES; ++i)
    UNROLL for (int c = 0; c < COLUMNS; ++c)
      UNROLL for (int e = 0; e < 4; ++e) {
        const uint column = uint(8 * c) + 2u * pair_of(lane) + uint(e & 1), row = g + 8u * uint(e >> 1);
        parts[(simdgroup * uint(TILES) + uint(i)) * OF_TILE + column * 16u + row] = sum[i][c][e];
      }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint n_out = uint(sizes[AT_n_out]), n_wanted = metal::min(n_rows, uint(8 * COLUMNS)) * 16u;
  constexpr uint OUT_TILES = uint(GATE ? 1 : TILES);
  for (uint at = index; at < n_wanted * OUT_TILES; at += uint(32 * SIMDGROUPS)) {
    const uint tile = at / n_wanted, in_tile = at % n_wanted, row = in_tile >> 4;
    const uint column = (GATE ? first_tile / 2u : first_tile + tile) * 16u + (in_tile & 15u);
    float all[TILES];
    UNROLL for (int i = 0; i < TILES; ++i) {
      all[i] = 0.0f;
      if (GATE || uint(i) == tile)
        for (uint other = 0u; other < uint(SIMDGROUPS); ++other) all[i] += parts[(other * uint(TILES) + uint(i)) * OF_TILE + in_tile];
    }
    float found = all[0];
    UNROLL for (int i = 1; i < TILES; ++i) found = tile == uint(i) ? all[i] : found;
    if (GATE) {
      const float gate = all[0], turned = GATE == 1 ? gate : 1.5957691216f * (gate + 0.044715f * gate * gate * gate);
      found = gate / (1.0f + exp2_fast(-1.4426950408889634f * turned)) * all[TILES - 1];
    }
    if (column < n_out) {
      if (ADDED) found += float(added[ulong(row) * ulong(sizes[AT_added_stride]) + ulong(column)]);
      out[ulong(row) * ulong(n_out) + ulong(column)] = OUT(found);
    }
  }
