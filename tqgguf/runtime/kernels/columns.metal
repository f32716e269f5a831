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

}  // namespace tq
