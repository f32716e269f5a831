// What is finite, and floats as f16: what is finite stays finite.
namespace tq {

// By bits, which no compiler's fast mathematics changes.
inline bool is_finite(float x) { return (as_type<uint>(x) & 0x7f800000u) != 0x7f800000u; }
// x, or the largest f16 in its place where it is finite and beyond.
inline float within_half(float x) {
  return !is_finite(x) ? x : x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x;
}
template <class T> inline T as_output(float x) { return T(x); }
template <> inline half as_output<half>(float x) { return half(within_half(x)); }

}  // namespace tq
