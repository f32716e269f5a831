  // The answer for one query column: partial sums of all splits joined, the coded ones rotated back. grid: x query columns
  // (kv head * n_columns + column; BATCHED: KV heads of all sequences, which share the sink logits). Sink logits take part
  // in the sum of weights and carry no value.
  using namespace tq;
  constexpr int PER_LANE = V_DIM / 32;
  SHARED(float, joined, SIMDGROUPS * V_DIM);
  const uint n_columns = uint(sizes[AT_group_size]) * uint(sizes[AT_n_rows]), n_coded = uint(sizes[AT_n_coded]), n_splits = n_coded + 1u;
  const uint column = threadgroup_position_in_grid.x % n_columns, head = threadgroup_position_in_grid.x / n_columns;
  const uint chunk = column / uint(8 * TILES), n_chunks = (n_columns + uint(8 * TILES) - 1u) / uint(8 * TILES);
  const uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
  const uint place = (head * n_chunks + chunk) * n_splits * uint(8 * TILES) + column % uint(8 * TILES);

  // What is read before the weights are known: the first AHEAD splits of each simdgroup, and what the end needs, the own
  // page's sums and the rotation.
  Rotation<PER_LANE, V_ROTATION> rotation;
  rotation.load(v_signs, lane);
  constexpr int AHEAD = 4;
  float ahead[AHEAD][PER_LANE], own[PER_LANE];
  UNROLL for (int k = 0; k < AHEAD; ++k) {
    const uint s = simdgroup + uint(k * SIMDGROUPS);
    UNROLL for (int i = 0; i < PER_LANE; ++i)
      ahead[k][i] = s < n_coded ? sums[ulong(place + s * uint(8 * TILES)) * ulong(V_DIM) + ulong(uint(i) * 32u + lane)] : 0.0f;
  }
  const uint own_at = place + n_coded * uint(8 * TILES);
  UNROLL for (int i = 0; i < PER_LANE; ++i) own[i] = sums[ulong(own_at) * ulong(V_DIM) + ulong(uint(i) * 32u + lane)];

  const float own_maximum = statistics[2u * own_at];

  float maximum = -1.0e30f, sum = 0.0f;
  for (uint s = lane; s < n_splits; s += 32u) {
    const uint at = 2u * (place + s * uint(8 * TILES));
    const float of_split = statistics[at], both = metal::max(maximum, of_split);
    sum = sum * exp2_fast(maximum - both) + statistics[at + 1u] * exp2_fast(of_split - both);
    maximum = both;
  }
  const float of_lane = maximum;
  maximum = simd_max(maximum);
  float sink = 0.0f;
  if (SINKS) {
    sink = sinks[(BATCHED ? head % uint(sizes[AT_n_kv_heads]) : head) * uint(sizes[AT_group_size]) + column / uint(sizes[AT_n_rows])] * 1.4426950408889634f;
    maximum = metal::max(maximum, sink);
  }
  sum = simd_sum(sum * exp2_fast(of_lane - maximum));
  if (SINKS) sum += exp2_fast(sink - maximum);

  float x[PER_LANE];
  UNROLL for (int i = 0; i < PER_LANE; ++i) x[i] = 0.0f;
  UNROLL for (int k = 0; k < AHEAD; ++k) {
    const uint s = simdgroup + uint(k * SIMDGROUPS);
    const float weight = s < n_coded ? exp2_fast(statistics[2u * (place + s * uint(8 * TILES))] - maximum) : 0.0f;
    UNROLL for (int i = 0; i < PER_LANE; ++i) x[i] += weight * ahead[k][i];
  }
  for (uint s = simdgroup + uint(AHEAD * SIMDGROUPS); s < n_coded; s += uint(SIMDGROUPS)) {
    const uint at = place + s * uint(8 * TILES);
    const float weight = exp2_fast(statistics[2u * at] - maximum);
    UNROLL for (int i = 0; i < PER_LANE; ++i) x[i] += weight * sums[ulong(at) * ulong(V_DIM) + ulong(uint(i) * 32u + lane)];
  }
  UNROLL for (int i = 0; i < PER_LANE; ++i) joined[simdgroup * uint(V_DIM) + uint(i) * 32u + lane] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup == 0u) {
    UNROLL for (int i = 0; i < PER_LANE; ++i) {
      float v = 0.0f;
      for (int k = 0; k < SIMDGROUPS; ++k) v += joined[uint(k * V_DIM + i * 32) + lane];
      x[i] = v;
    }
    rotation.undo(x, lane);
    const float weight = exp2_fast(own_maximum - maximum), inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
    UNROLL for (int i = 0; i < PER_LANE; ++i)
      out[(head * n_columns + column) * uint(V_DIM) + uint(i) * 32u + lane] = as_output<T>((x[i] + weight * own[i]) * inverse);
  }
