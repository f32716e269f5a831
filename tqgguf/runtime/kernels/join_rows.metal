  // Rows of a tail f16 [heads, n_held, DIM] and new ones T [heads, n_new, DIM] after them: f16 [heads, n_held + n_new, DIM].
  // Values beyond f16's range become its largest. One thread a value of a row; grid: x rows, y heads.
  using namespace tq;
  const uint head = threadgroup_position_in_grid.y, n_held = uint(sizes[AT_n_held]), n_new = uint(sizes[AT_n_new]);
  const uint row = threadgroup_position_in_grid.x, n_rows = n_held + n_new;
  for (uint d = thread_index_in_threadgroup; d < uint(sizes[AT_dim]); d += uint(32 * SIMDGROUPS)) {
    float x;
    if (row < n_held) x = float(tail[(head * n_held + row) * uint(sizes[AT_dim]) + d]);
    else x = float(fresh[(head * n_new + row - n_held) * uint(sizes[AT_dim]) + d]);
    x = x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x;  // NaN stays
    out[(head * n_rows + row) * uint(sizes[AT_dim]) + d] = half(x);
  }
