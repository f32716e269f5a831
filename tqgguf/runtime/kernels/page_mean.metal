// What a page's mean is made of: the middle of values, whatever their order, so that all backends find the same.
namespace tq {

// Floats in their order as unsigned numbers, and back.
inline uint place_in_order(float x) {
  const uint bits = as_type<uint>(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
inline float at_place(uint place) { return as_type<float>(place & 0x80000000u ? place & 0x7fffffffu : ~place); }

// The lower median of n values, `stride` apart, by bisection: the last number with no more than (n - 1) / 2 values below it.
// Of an f16 as a float the last 13 bits are the same in every place.
template <class T> inline float lower_median(const device T* values, uint n, uint stride) {
  constexpr uint lowest = sizeof(T) == 4 ? 1u : 1u << 13;
  uint found = 0u;
  for (uint bit = 0x80000000u; bit >= lowest; bit >>= 1) {
    uint below = 0u;
    for (uint i = 0; i < n; ++i) below += place_in_order(float(values[i * stride])) < (found | bit) ? 1u : 0u;
    if (below <= (n - 1u) / 2u) found |= bit;
  }
  return at_place(found & 0x80000000u ? found : found | (lowest - 1u));
}

}  // namespace tq
