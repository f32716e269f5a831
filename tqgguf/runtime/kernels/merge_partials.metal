  // The answer for one query column: partial sums of all splits joined, the coded ones rotated back. grid: x query columns
  // (kv head * n_columns + column). Sink logits take part in the sum of weights and carry no value.
  using namespace tq;
  constexpr int PER_LANE = V_DIM / 32;
  SHARED(float, joined, SIMDGROUPS * V_DIM);
  const uint n_columns = uint(sizes[AT_group_size]) * uint(sizes[AT_n_rows]), n_coded = uint(sizes[AT_n_coded]), n_splits = n_coded + 1u;
  const uint column = threadgroup_position_in_grid.x % n_columns, head = threadgroup_position_in_grid.x / n_columns;
  const uint chunk = column / uint(8 * TILES), n_chunks = (n_columns + uint(8 * TILES) - 1u) / uint(8 * TILES);
  const uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
  const uint place = (head * n_chunks + chunk) * n_splits * uint(8 * TILES) + column % uint(8 * TILES);

  float maximum = -1.0e30f, sink = 0.0f;
  if (SINKS) {
    sink = sinks[head * uint(sizes[AT_group_size]) + column / uint(sizes[AT_n_rows])] * 1.4426950408889634f;
    maximum = sink;
  }
  for (uint s = lane; s < n_splits; s += 32u) maximum = metal::max(maximum, float(statistics[2u * (place + s * uint(8 * TILES))]));
  maximum = simd_max(maximum);
  float sum = 0.0f;
  for (uint s = lane; s < n_splits; s += 32u) {
    const uint at = 2u * (place + s * uint(8 * TILES));
    sum += statistics[at + 1u] * exp2_fast(statistics[at] - maximum);
  }
  sum = simd_sum(sum);
  if (SINKS) sum += exp2_fast(sink - maximum);

  float x[PER_LANE];
  UNROLL for (int i = 0; i < PER_LANE; ++i) x[i] = 0.0f;
  for (uint s = simdgroup; s < n_coded; s += uint(SIMDGROUPS)) {
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
    unrotate<PER_LANE, V_ROTATION>(x, v_signs, lane);
    const uint at = place + n_coded * uint(8 * TILES);
    const float weight = exp2_fast(statistics[2u * at] - maximum), inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
    UNROLL for (int i = 0; i < PER_LANE; ++i) {
      const float own = sums[ulong(at) * ulong(V_DIM) + ulong(uint(i) * 32u + lane)];
      out[(head * n_columns + column) * uint(V_DIM) + uint(i) * 32u + lane] = T((x[i] + weight * own) * inverse);
    }
  }
