  // Tails of K and V f16 [heads, n_held, dim], each with new rows T [heads, n_new, dim] after them: f16 [heads, rows, dim].
  // Finite values beyond f16's range become its largest; infinity and NaN stay. capacity: rows that there is room for in tails
  // of fixed length, which come and go with all of them; 0 for tails that grow. position[0]: how many rows are held, or, in
  // tails of fixed length, the position of the first new one. n_heads: of each sequence of a batch, whose position has two
  // numbers for each: that of its first new row, and how many are its own; 0 for one sequence.
  // grid: x rows, y heads, z sides.
  using namespace tq;
  const bool is_v = threadgroup_position_in_grid.z == 1u;
  const uint head = threadgroup_position_in_grid.y, row = threadgroup_position_in_grid.x;
  const uint n_rows = threadgroups_per_grid.x, capacity = uint(sizes[AT_capacity]), n_heads = uint(sizes[AT_n_heads]);
  const uint at_sequence = n_heads ? head / n_heads * 2u : 0u;
  const uint n_held = capacity ? uint(position[at_sequence]) % capacity : uint(position[0]);
  const uint n_given = capacity ? uint(sizes[AT_n_new]) : n_rows - n_held, stride = capacity ? capacity : n_held;
  const uint n_new = n_heads ? uint(position[at_sequence + 1u]) : n_given;
  const uint dim = uint(sizes[is_v ? AT_v_dim : AT_k_dim]);
  for (uint d = thread_index_in_threadgroup; d < dim; d += uint(32 * SIMDGROUPS)) {
    const uint held = (head * stride + row) * dim + d, fresh = (head * n_given + row - n_held) * dim + d;
    float x;
    if (row < n_held || row >= n_held + n_new) {
      x = is_v ? float(v_tail[held]) : float(k_tail[held]);
    } else {
      x = is_v ? float(v_new[fresh]) : float(k_new[fresh]);
    }
    x = within_half(x);
    const uint at = (head * n_rows + row) * dim + d;
    if (is_v) {
      v[at] = half(x);
    } else {
      k[at] = half(x);
    }
  }
