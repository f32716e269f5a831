// Codes as numbers of half precision T, two in a word, for matrix fragments: the code's bits under an exponent for which the last bit is
// worth 1, so that a code is base_of<T> too large.
namespace tq {

template <class T> constexpr float base_of() { return 1024.0f; }
template <> constexpr float base_of<bfloat>() { return 128.0f; }
template <class T> constexpr uint base_pair() { return 0x64006400u; }
template <> constexpr uint base_pair<bfloat>() { return 0x43004300u; }
template <class T> constexpr uint ones_pair() { return 0x3c003c00u; }
template <> constexpr uint ones_pair<bfloat>() { return 0x3f803f80u; }

template <class T> inline float first_value(uint pair) { return low_half(pair); }
template <> inline float first_value<bfloat>(uint pair) { return as_type<float>(pair << 16); }
template <class T> inline float second_value(uint pair) { return high_half(pair); }
template <> inline float second_value<bfloat>(uint pair) { return as_type<float>(pair & 0xffff0000u); }
template <class T> inline uint value_pair(float first, float second) { return pack_halves(first, second); }
template <> inline uint value_pair<bfloat>(float first, float second) {
  return pack_bfloats(first, second);
}
// The float of which T has all bits, in both halves.
template <class T> inline uint same_pair(float exact) { return value_pair<T>(exact, exact); }

// Numbers of two codes: a table of all pairs for types whose codes stand for others.
constexpr int TABLE_PAIRS = 256;
template <int TYPE, class T> inline void fill_table(SHARED_POINTER(uint) table, uint thread_index, uint n_threads) {
  for (uint i = thread_index; i < uint(TABLE_PAIRS); i += n_threads)
    table[i] = value_pair<T>(float(table_number(TYPE, i & 15u)), float(table_number(TYPE, i >> 4)));
}

}  // namespace tq
