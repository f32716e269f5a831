// Rows of x, T [n_rows, length], as second factors of matrix fragments: a row is a column of the factor.
namespace tq {

// Run after run of 16 values: element (k, n) of a factor is value 4 * (k % 8 / 2) + 2 * (k / 8) + k % 2 of row first + n, so that in CUDA's order of elements
// a lane's four lie together. Rows beyond the last are the last again: what comes of them nobody reads.
template <class T> struct Columns {
  const device T* first;
  const device T* second;
  const device T* first_now;
  const device T* second_now;

  void start(const device T* x, uint length, uint n_rows, uint row, uint lane) {
    const uint last = n_rows - 1u;
    if (PAIRS_DOWN) {
      first = x + ulong(metal::min(row + row_of(lane), last)) * ulong(length) + ulong(4u * pair_of(lane));
      second = first;
    } else {
      const uint k = row_of(lane), at = 4u * (k >> 1) + (k & 1u), n = row + 2u * pair_of(lane);
      first = x + ulong(metal::min(n, last)) * ulong(length) + ulong(at);
      second = x + ulong(metal::min(n + 1u, last)) * ulong(length) + ulong(at);
    }
  }

  void go_to(uint value) {
    first_now = first + value;
    second_now = second + value;
  }

  // The run that begins `run` values after where it has gone to.
  void read(int run, thread uint* b) const {
    if (PAIRS_DOWN) {
      const uint2 words = *(const device uint2*)(first_now + run);
      b[0] = words.x;
      b[1] = words.y;
    } else {
      b[0] = uint(as_type<ushort>(first_now[run])) | uint(as_type<ushort>(second_now[run])) << 16;
      b[1] = uint(as_type<ushort>(first_now[run + 2])) | uint(as_type<ushort>(second_now[run + 2])) << 16;
    }
  }
};

// The RMS norm of a row T [2 * n_words], times weights f32 [2 * n_words + 1] (the last: epsilon), as T to `normed`. By all threads.
template <class T>
inline void norm_row(const device T* x, const device float* weights, uint n_words, uint thread_index, uint n_threads, SHARED_POINTER(float) squares, SHARED_POINTER(uint) normed) {
  float sum = 0.0f;
  for (uint i = thread_index; i < n_words; i += n_threads) {
    const uint pair = ((const device uint*)x)[i];
    const float a = first_value<T>(pair), b = second_value<T>(pair);
    sum += a * a + b * b;
  }
  sum = simd_sum(sum);
  if (thread_index % 32u == 0u) squares[thread_index / 32u] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float all = 0.0f;
  for (uint i = 0u; i < n_threads / 32u; ++i) all += squares[i];
  const float factor = 1.0f / metal::sqrt(all / float(2u * n_words) + weights[2u * n_words]);
  for (uint i = thread_index; i < n_words; i += n_threads) {
    const uint pair = ((const device uint*)x)[i];
    normed[i] = value_pair<T>(first_value<T>(pair) * factor * weights[2u * i], second_value<T>(pair) * factor * weights[2u * i + 1u]);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// A factor's elements, all of whose columns are that row, from word `run` on.
inline void read_normed(SHARED_POINTER(uint) normed, uint run, uint lane, thread uint* b) {
  const uint k = row_of(lane), first = run + 2u * (PAIRS_DOWN ? pair_of(lane) : k >> 1);
  const uint words[2] = {normed[first], normed[first + 1u]};
  UNROLL for (int i = 0; i < 2; ++i) b[i] = PAIRS_DOWN ? words[i] : halves_at(words[i], words[i], k & 1u);
}

}  // namespace tq
