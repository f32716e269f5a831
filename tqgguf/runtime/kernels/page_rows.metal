// Rows of blocks as four lanes take them: of every 32 values eight neighbours each, so that lane `part` has value
// c * 32 + part * 8 + i as its c-th eight's i-th. Codes, and the inverse rotation of SPAN values.
namespace tq {

inline void load_halves(const device half* from, thread float* x) {
  uint words[4];
  load_bytes<16, 16>((const device uchar*)from, words);
  UNROLL for (int i = 0; i < 4; ++i) {
    x[2 * i] = low_half(words[i]);
    x[2 * i + 1] = low_half(words[i] >> 16);
  }
}

template <class T> inline uint pack_two(float a, float b) { return uint(as_type<ushort>(T(a))) | (uint(as_type<ushort>(T(b))) << 16); }
template <> inline uint pack_two<half>(float a, float b) { return pack_halves(within_half(a), within_half(b)); }
template <> inline uint pack_two<float>(float, float) { return 0u; }
// N values as T to an aligned address, 16 bytes at a time, or eight where there are no more.
template <int N, class T> inline void store_values(device T* to, const thread float* x) {
  constexpr int words = N * int(sizeof(T)) / 4;
  uint word[words];
  UNROLL for (int i = 0; i < words; ++i) word[i] = sizeof(T) == 4 ? as_type<uint>(x[i]) : pack_two<T>(x[2 * i % N], x[(2 * i + 1) % N]);
  if (words == 2) {
    uint2 two;
    two.x = word[0];
    two.y = word[1];
    *(device uint2*)to = two;
  } else {
    UNROLL for (int i = 0; i < words / 4; ++i) {
      uint4 four;
      four.x = word[4 * i];
      four.y = word[4 * i + 1];
      four.z = word[4 * i + 2];
      four.w = word[4 * i + 3];
      ((device uint4*)to)[i] = four;
    }
  }
}

// Codes of eight neighbours from `value` on, a multiple of eight, of a group in a row; bytes of Q8_0 with their sign.
template <int TYPE, int DIM, int GROUP> inline void codes_of_row(const device uchar* codes, uint value, thread uint* found) {
  typedef Part<TYPE, DIM, GROUP, 1> Row;
  constexpr int low = low_bits(TYPE), bytes = TYPE == Q4_0 ? 8 : low;
  uint words[2], high = 0u;
  load_bytes<bytes, alignment_of(Row::row_bytes | Row::group_bytes | bytes)>(codes + (TYPE == Q4_0 ? value % 16u : value * uint(low) / 8u), words);
  if (high_bits(TYPE)) high = uint(codes[uint(Row::low) + value / 8u]);
  UNROLL for (int i = 0; i < 8; ++i) {
    if (TYPE == Q8_0 || TYPE == Q4_0) {
      const uint byte = words[i / 4] >> (8 * (i % 4)) & 0xffu;
      found[i] = TYPE == Q8_0 ? byte : byte >> (value / 16u * 4u) & 15u;
    } else {
      found[i] = words[0] >> (i * low) & ((1u << low) - 1u);
      if (high_bits(TYPE)) found[i] |= (high >> i & 1u) << low;
    }
  }
}

// The same from a group's words in a tile, for token in_tile of it. Two neighbours' pairs lie together, and eight values'
// pairs of all four tokens of a slot in `bits` words.
template <int TYPE, int DIM, int GROUP> inline void codes_of_tile(const device uint* group, uint value, uint in_tile, thread uint* found) {
  typedef Tile<TYPE, DIM, GROUP> tile;
  const uint slot = value / uint(GROUP / 8) * 4u + in_tile / 4u, first = value % uint(GROUP / 8) / 8u * uint(tile::bits);
  const uint second = in_tile / 2u % 2u, element = in_tile % 2u;  // which pair of tokens, and which of it
  uint w[tile::bits];
  UNROLL for (int i = 0; i < tile::bits; ++i) w[i] = group[tile::place(slot, first + uint(i))];
  UNROLL for (int i = 0; i < 4; ++i) {
    uint two = 0u;
    if (tile::bits == 3) {
      two = (i < 3 ? w[i % tile::bits] : tile::last_four(w)) >> (16u * second);
      const uint low = two >> (2u * element), high = two >> (2u + element);
      found[2 * i] = (low & 3u) | (high & 4u);
      found[2 * i + 1] = (low >> 8 & 3u) | (high >> 8 & 4u);
    } else {
      constexpr uint width = uint(tile::width), mask = (1u << tile::bits) - 1u;
      two = w[i * tile::bits / 4] >> ((uint(i * 4 % tile::per_word) + 2u * second) * width + element * uint(tile::bits));
      found[2 * i] = two & mask;
      found[2 * i + 1] = two >> width & mask;
    }
  }
}

// x / y, rounded once, by y's reciprocal, which is rounded once too.
inline float divided(float x, float y, float reciprocal) {
  const float q = times(x, reciprocal);
  return multiply_add(multiply_add(-q, y, x), reciprocal, q);
}

// Walsh-Hadamard of SPAN values in natural order, unscaled: the order of its levels is that of all backends.
template <int N> inline void turn_within_lanes(thread float* x, int from, int to) {
  UNROLL for (int width = from; width < to; width *= 2) {
    UNROLL for (int i = 0; i < N; ++i) {
      if ((i & width) == 0) {
        const float a = x[i], b = x[i + width];
        x[i] = a + b;
        x[i + width] = a - b;
      }
    }
  }
}
template <int SPAN> inline void hadamard_of_four_lanes(thread float* x, uint lane) {
  constexpr int N = SPAN / 4;
  turn_within_lanes<N>(x, 1, 8);
  UNROLL for (int mask = 1; mask < 4; mask *= 2) {
    const float sign = (lane & uint(mask)) ? -1.0f : 1.0f;
    UNROLL for (int i = 0; i < N; ++i) x[i] = multiply_add(x[i], sign, simd_shuffle_xor(x[i], ushort(mask)));
  }
  turn_within_lanes<N>(x, 8, N);
}

}  // namespace tq
