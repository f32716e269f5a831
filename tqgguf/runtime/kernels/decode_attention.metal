  // Attention of a few query rows over one KV head's keys: one threadgroup for one share of them. grid: x the shares
  // ("splits"), y KV heads, z chunks of 8 * TILES query columns; column c is head c / n_rows of the group, row c % n_rows.
  // Splits below n_coded read whole pages as blocks, each simdgroup a run of steps; the last one reads the exact prefix and
  // the own page in f16. Writes sums f32 [kv heads, chunks, splits, 8 * TILES, V_DIM] (coded: in V's rotated domain) and
  // statistics f32 [..., 8 * TILES, 2].
  // BATCHED: grid y is sequence * KV heads + head, and so are the first axes of queries, tails and channel scales. position
  // has two numbers for each sequence, its first query's position and how many of the rows are its own (the others' answers
  // mean nothing). Pages of all sequences lie in slots of one pool; `sizes` ends with their slots, int32 [sequences, columns].
  using namespace tq;
  constexpr int STEP = 16 * KEY_TILES;
  constexpr int SLICES = V_DIM / 16;
  constexpr int K_SHIFT = TABLE_ROWS ? ROW_SHIFT : log2_of(K_COPIES) + 2, V_SHIFT = TABLE_ROWS ? ROW_SHIFT : log2_of(V_COPIES) + 2;
  constexpr int K_TABLE = table_entries(K_TYPE) * K_COPIES;
  constexpr int V_TABLE = ONE_TABLE ? 0 : table_entries(V_TYPE) * V_COPIES;
  // The larger table lies first: both are aligned to their size. Or they share rows.
  constexpr int K_START = V_TABLE > K_TABLE && !TABLE_ROWS ? V_TABLE : 0;
  constexpr int V_START = ONE_TABLE ? 0 : TABLE_ROWS ? ROW_COPIES : V_TABLE > K_TABLE ? 0 : K_TABLE;
  constexpr int ROOM = larger(TABLE_ROWS ? 256 * ROW_WORDS : K_TABLE + V_TABLE, larger(SIMDGROUPS * 32, 2048));
  typedef KeyLayout<K_TYPE, K_DIM, K_GROUP, K_SHIFT> CodedK;
  typedef ValueLayout<V_TYPE, V_DIM, V_GROUP, V_SHIFT> CodedV;
  typedef KeyLayout<F16, K_DIM, 32, 2> PlainK;
  typedef ValueLayout<F16, V_DIM, 32, 2> PlainV;
  SHARED_AT_LAUNCH(uint, table, ROOM);
  SHARED(half, coded_query, 8 * TILES * K_DIM);
  SHARED(half, plain_query, 8 * TILES * K_DIM);
  SHARED(float, column_factors, 2 * 8 * TILES);
  SHARED(float, maxima, SIMDGROUPS * 8 * TILES);
  SHARED(float, weight_sums, SIMDGROUPS * 8 * TILES);

  const uint any_head = threadgroup_position_in_grid.y, split = threadgroup_position_in_grid.x;  // of all sequences
  const uint n_heads = BATCHED ? uint(sizes[AT_n_kv_heads]) : threadgroups_per_grid.y, n_splits = threadgroups_per_grid.x;
  const uint sequence = BATCHED ? any_head / n_heads : 0u, head = BATCHED ? any_head % n_heads : any_head;
  const uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
  const uint group_size = uint(sizes[AT_group_size]), n_rows = uint(sizes[AT_n_rows]), offset = uint(position[2u * sequence]);
  const uint n_coded = uint(sizes[AT_n_coded]), own_start = offset / PAGE * PAGE;
  const uint window = uint(sizes[AT_window]);
  const uint first_column = threadgroup_position_in_grid.z * uint(8 * TILES), n_columns = group_size * n_rows;

  // What is the same for all steps, asked for at once: each load takes longer than all that is computed here.
  constexpr int PER_LANE = K_DIM / 32, THREADS = 32 * SIMDGROUPS;
  constexpr bool FILL_K = has_table(K_TYPE), FILL_V = has_table(V_TYPE) && !ONE_TABLE;
  Rotation<PER_LANE, K_ROTATION> rotation;
  TableRows<FILL_K ? K_TYPE : TURBO2, THREADS> rows_of_k;
  TableRows<FILL_V ? V_TYPE : TURBO2, THREADS> rows_of_v;
  float channels[PER_LANE];
  rotation.load(k_signs, lane);
  if (TABLE_ROWS && FILL_K) rows_of_k.load(k_book, thread_index_in_threadgroup);
  if (TABLE_ROWS && FILL_V) rows_of_v.load(v_book, thread_index_in_threadgroup);
  UNROLL for (int i = 0; i < PER_LANE; ++i) channels[i] = SCALED ? channel_scale[any_head * uint(K_DIM) + uint(i) * 32u + lane] : 1.0f;
  const float scale = factors[0] * 1.4426950408889634f;  // log2(e): weights are powers of two

  // A column sees keys whose distance to its position is below `window`; 0 stands for all.
  const uint reach = window == 0u ? 0xffffffffu : window;
  const bool is_coded = split < n_coded;

  // Coded: the threadgroup's run of steps, over which its simdgroups take turns. Else steps of the exact prefix, then of
  // the own page. The first step's keys are on their way while queries are prepared.
  const uint steps_of_page = PAGE / uint(STEP);
  const uint first_seen = offset >= reach ? (offset - reach + 1u) / PAGE : 0u;
  const uint first_page = metal::max(first_seen, uint(sizes[AT_first_page])), n_pages = own_start / PAGE - first_page;
  const uint n_own = offset + (BATCHED ? uint(position[2u * sequence + 1u]) : n_rows) - own_start;
  const uint n_prefix = first_page > 0u || own_start == 0u ? 0u : uint(sizes[AT_n_prefix]);
  const uint prefix_steps = (n_prefix + uint(STEP) - 1u) / uint(STEP);
  const uint n_steps = is_coded ? n_pages * steps_of_page : prefix_steps + (n_own + uint(STEP) - 1u) / uint(STEP);
  const uint end = is_coded ? (split + 1u) * n_steps / n_coded : n_steps;
  uint step = (is_coded ? split * n_steps / n_coded : 0u) + simdgroup;
  const uint k_first = first_page - uint(sizes[AT_k_page]), v_first = first_page - uint(sizes[AT_v_page]);
  const device int* slots = sizes + (BATCHED ? uint(AT_table) + sequence * uint(sizes[AT_table_columns]) + first_page : 0u);
  uint slot = BATCHED && is_coded && step < end ? uint(slots[step / steps_of_page]) : 0u;  // of the step's page
  const uint k_stride = K_TYPE == F16 ? n_heads * uint(CodedK::part::row_bytes) : uint(CodedK::part::row_bytes);
  const uint v_stride = V_TYPE == F16 ? n_heads * uint(CodedV::part::row_bytes) : uint(CodedV::part::row_bytes);
  // Where a plane with `first` has the head's rows of the step.
#define row_index(first) (((BATCHED ? slot : (first) + step / steps_of_page) * n_heads + head) * PAGE + step % steps_of_page * uint(STEP))
  uint k_row = row_index(k_first), v_row = row_index(v_first);
#define ROWS_OF(TYPE, codes, scales_plane, layout, stride, first, row)                                                              \
  StepRows<false> {                                                                                                                  \
    (const device uchar*)codes + (TYPE == F16 ? ulong((first) * PAGE + step * uint(STEP)) * ulong(stride) + head * uint(layout::part::row_bytes) \
                                              : ulong(row) * ulong(uint(layout::part::row_bytes))),                     \
        (const device half*)scales_plane + (has_scale(TYPE) ? ulong(row) * ulong(uint(layout::scales)) : ulong(0u)), stride, 0u \
  }
  StepKeys<CodedK, KEY_TILES> keys;
  constexpr int PAGES_ON = larger(1, SIMDGROUPS * STEP / int(PAGE));  // from page to page of a simdgroup
  StepKeys<PlainK, 1> means_of_lane;
  uint means_page = step / steps_of_page;  // pages since first_page
  const device half* means = (const device half*)page_means + ((BATCHED ? 0u : k_first * n_heads) + head) * uint(K_DIM);
  if (is_coded && step < end) {
    keys.load(ROWS_OF(K_TYPE, k_codes, k_scales, CodedK, k_stride, k_first, k_row), lane);
    if (CENTRED) load_means<PlainK, PAGES_ON, BATCHED>(means, slots, n_heads * uint(K_DIM), means_page, n_pages - 1u, lane, means_of_lane);
  }

  float x[PER_LANE];
  const uint queries = any_head * n_columns * uint(K_DIM);
  load_column(q + queries, first_column + simdgroup, n_columns, lane, x);
  if (TABLE_ROWS) {
    if (FILL_K) rows_of_k.store(table + K_START, thread_index_in_threadgroup);
    if (FILL_V) rows_of_v.store(table + V_START, thread_index_in_threadgroup);
  } else {
    if (FILL_K) fill_table<K_TYPE, K_COPIES, THREADS>(table + K_START, k_book, thread_index_in_threadgroup);
    if (FILL_V) fill_table<V_TYPE, V_COPIES, THREADS>(table + V_START, v_book, thread_index_in_threadgroup);
  }

  // Queries: in original axes brought below 2 by a power of two (so that f16 queries stay exact), and as blocks have them.
  for (uint c = simdgroup; c < uint(8 * TILES); c += uint(SIMDGROUPS)) {
    float most = 0.0f;
    UNROLL for (int i = 0; i < PER_LANE; ++i) most = metal::max(most, metal::abs(x[i]));
    const float power = power_below(simd_max(most)), inverse = inverse_power(power);
    UNROLL for (int i = 0; i < PER_LANE; ++i) x[i] *= inverse;
    store_query<PlainK, PER_LANE>(x, plain_query, c, lane);
    if (SCALED) {
      UNROLL for (int i = 0; i < PER_LANE; ++i) x[i] = divide_fast(x[i], channels[i]);
    }
    rotation.apply(x, lane);
    most = 0.0f;
    UNROLL for (int i = 0; i < PER_LANE; ++i) most = metal::max(most, metal::abs(x[i]));
    const float coded_power = power_below(simd_max(most)), coded_inverse = inverse_power(coded_power);
    UNROLL for (int i = 0; i < PER_LANE; ++i) x[i] *= coded_inverse;
    store_query<CodedK, PER_LANE>(x, coded_query, c, lane);
    if (lane == 0u) {
      column_factors[c] = power * scale;
      column_factors[uint(8 * TILES) + c] = power * coded_power * scale * scale_factor(K_TYPE);
    }
    if (c + uint(SIMDGROUPS) < uint(8 * TILES)) load_column(q + queries, first_column + c + uint(SIMDGROUPS), n_columns, lane, x);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint k_address = opaque(table_address(table, uint(4 * K_START) + ((lane & uint(K_COPIES - 1)) << 2)));
  const uint v_address = opaque(table_address(table, uint(4 * V_START) + ((lane & uint(V_COPIES - 1)) << 2)));

  float plain_factor[TILES][2], coded_factor[TILES][2], nothing[TILES][2];
  uint column_position[TILES][2];
  UNROLL for (int t = 0; t < TILES; ++t)
    UNROLL for (int e = 0; e < 2; ++e) {
      const uint c = uint(8 * t + e) + 2u * pair_of(lane);
      plain_factor[t][e] = column_factors[c];
      coded_factor[t][e] = column_factors[uint(8 * TILES) + c];
      nothing[t][e] = 0.0f;
      column_position[t][e] = offset + (first_column + c) % n_rows;
    }

  Running<SLICES, TILES> running;
  running.clear();
  const uint place = ((any_head * threadgroups_per_grid.z + threadgroup_position_in_grid.z) * n_splits + split) * uint(8 * TILES);

  if (is_coded) {
    // keys that some column must not see: of the exact prefix, and those before the last row's window
    const uint last_position = offset + n_rows - 1u;
    const uint all_see = metal::max(n_prefix, last_position >= reach ? last_position - reach + 1u : 0u);
    float page_offset[TILES][2], mean_products[1][TILES][4];  // q . mean of this page, and of sixteen pages
    UNROLL for (int t = 0; t < TILES; ++t)
      UNROLL for (int e = 0; e < 2; ++e) page_offset[t][e] = 0.0f;

    if (CENTRED && step < end) score<PlainK, TILES, 1>(means_of_lane, plain_query, plain_factor, nothing, table, k_address, lane, mean_products);

    StepValues<CodedV, KEY_TILES, V_TILED> values;
    for (; step < end;) {
      const uint next_slot = BATCHED && step + uint(SIMDGROUPS) < end ? uint(slots[(step + uint(SIMDGROUPS)) / steps_of_page]) : 0u;
      values.load(ROWS_OF(V_TYPE, v_codes, v_scales, CodedV, v_stride, v_first, v_row), lane);
      if (CENTRED) {
        uint i = (step / steps_of_page - means_page) / uint(PAGES_ON);
        if (i >= 16u) {
          means_page = step / steps_of_page;
          i = 0u;
          StepKeys<PlainK, 1> next_means;
          load_means<PlainK, PAGES_ON, BATCHED>(means, slots, n_heads * uint(K_DIM), means_page, n_pages - 1u, lane, next_means);
          score<PlainK, TILES, 1>(next_means, plain_query, plain_factor, nothing, table, k_address, lane, mean_products);
        }
        const uint source = lane_at(i & 7u, pair_of(lane));
        UNROLL for (int t = 0; t < TILES; ++t)
          UNROLL for (int e = 0; e < 2; ++e) page_offset[t][e] = simd_shuffle(i < 8u ? mean_products[0][t][e] : mean_products[0][t][e + 2], ushort(source));
      }
      float scores[KEY_TILES][TILES][4];
      score<CodedK, TILES, KEY_TILES>(keys, coded_query, coded_factor, page_offset, table, k_address, lane, scores);
      const uint first_key = first_page * PAGE + step * uint(STEP);
      step += uint(SIMDGROUPS);
      slot = next_slot;
      if (!BATCHED && uint(SIMDGROUPS) % steps_of_page == 0u) {  // whole pages on
        k_row += uint(SIMDGROUPS) / steps_of_page * n_heads * PAGE;
        v_row += uint(SIMDGROUPS) / steps_of_page * n_heads * PAGE;
      } else {
        k_row = row_index(k_first);
        v_row = row_index(v_first);
      }
      if (step < end) keys.load(ROWS_OF(K_TYPE, k_codes, k_scales, CodedK, k_stride, k_first, k_row), lane);
      if (first_key < all_see) {
        UNROLL for (int u = 0; u < KEY_TILES; ++u)
          UNROLL for (int t = 0; t < TILES; ++t)
            UNROLL for (int i = 0; i < 4; ++i) {
              const uint key = first_key + key_of(row_of(lane)) + uint(16 * u + 2 * (i / 2));
              if (key < n_prefix || column_position[t][i % 2] - key >= reach) scores[u][t][i] = -INFINITY;
            }
      }
      take<CodedV>(scores, values, table, v_address, lane, running);
    }
    write_sums<CodedV, TILES, SIMDGROUPS, SLICES, ROOM>(running, table, maxima, weight_sums, sums + ulong(place) * ulong(V_DIM), statistics + 2u * place, lane, simdgroup);
  } else {
    for (; step < end; step += uint(SIMDGROUPS)) {
      const bool in_prefix = step < prefix_steps;
      const uint first = (in_prefix ? step : step - prefix_steps) * uint(STEP), count = in_prefix ? n_prefix : n_own;
      const uint at = in_prefix ? 1u : 0u;
      const uint k_token = uint(sizes[AT_k_token + at]), v_token = uint(sizes[AT_v_token + at]);
      const device half* k_at = (in_prefix ? (const device half*)k_prefix : (const device half*)k_rows);
      const device half* v_at = (in_prefix ? (const device half*)v_prefix : (const device half*)v_rows);
      // no distance from head to head: the own rows of all heads lie together, as many as there are
      const uint k_head = uint(sizes[AT_k_head + at]), v_head = uint(sizes[AT_v_head + at]);
      k_at += ulong(any_head) * ulong(k_head ? k_head : n_own * uint(K_DIM)) + ulong(uint(sizes[AT_k_start + at]) + first * k_token);
      v_at += ulong(any_head) * ulong(v_head ? v_head : n_own * uint(V_DIM)) + ulong(uint(sizes[AT_v_start + at]) + first * v_token);
      const uint last = count - 1u - first;
      StepKeys<PlainK, KEY_TILES> own_keys;
      StepValues<PlainV, KEY_TILES, false> values;
      own_keys.load(StepRows<true>{(const device uchar*)k_at, (const device half*)0, 2u * k_token, last}, lane);
      values.load(StepRows<true>{(const device uchar*)v_at, (const device half*)0, 2u * v_token, last}, lane);
      float scores[KEY_TILES][TILES][4];
      score<PlainK, TILES, KEY_TILES>(own_keys, plain_query, plain_factor, nothing, table, k_address, lane, scores);
      UNROLL for (int u = 0; u < KEY_TILES; ++u)
        UNROLL for (int t = 0; t < TILES; ++t)
          UNROLL for (int i = 0; i < 4; ++i) {
            const uint row = first + key_of(row_of(lane)) + uint(16 * u + 2 * (i / 2)), key = in_prefix ? row : own_start + row;
            if (row >= count || key > column_position[t][i % 2] || column_position[t][i % 2] - key >= reach) scores[u][t][i] = -INFINITY;
          }
      take<PlainV>(scores, values, table, v_address, lane, running);
    }
    write_sums<PlainV, TILES, SIMDGROUPS, SLICES, ROOM>(running, table, maxima, weight_sums, sums + ulong(place) * ulong(V_DIM), statistics + 2u * place, lane, simdgroup);
  }
#undef ROWS_OF
#undef row_index
