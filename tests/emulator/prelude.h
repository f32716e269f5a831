// The kernels' prelude (tqgguf/runtime/kernels/prelude.metal) for the emulator: the same names, their meaning spelled out.
// Matrix elements lie as in Metal, or with -DCUDA_ELEMENTS as in CUDA's prelude.
#pragma once
#include "msl.h"

namespace tq {

inline uint16_t bits_of_half(float x) {
  const half h = half(x);
  uint16_t bits;
  memcpy(&bits, &h, 2);
  return bits;
}
inline float half_from_bits(uint bits) {
  const uint16_t low = uint16_t(bits);
  half h;
  memcpy(&h, &low, 2);
  return float(h);
}
inline uint pack_halves(float low, float high) { return uint(bits_of_half(low)) | uint(bits_of_half(high)) << 16; }
inline uint pack_bfloats(float low, float high) {
  return uint(as_type<uint16_t>(bfloat(low))) | uint(as_type<uint16_t>(bfloat(high))) << 16;
}
inline uint low_halves(uint x, uint y) { return (x & 0xffffu) | (y << 16); }
inline uint high_halves(uint x, uint y) { return (x >> 16) | (y & 0xffff0000u); }
inline uint double_bytes(uint x) { return (x & 0xffu) * 0x0101u | ((x >> 8) & 0xffu) * 0x01010000u; }
inline uint halves_at(uint x, uint y, uint which) { return which ? high_halves(x, y) : low_halves(x, y); }
inline float low_half(uint x) { return half_from_bits(x & 0xffffu); }
inline float high_half(uint x) { return half_from_bits(x >> 16); }
inline uint times_half(uint x, uint y, int which) {
  const float factor = which ? high_half(y) : low_half(y);
  return pack_halves(low_half(x) * factor, high_half(x) * factor);
}
inline uint sixteenths(uint word, int which) {
  const uint two = word >> (16 * which);
  return pack_halves(float(int8_t(two & 0xffu)) / 16, float(int8_t((two >> 8) & 0xffu)) / 16);
}
inline uint bits_under(uint word, uint mask, uint over) { return (word & mask) | over; }
// Byte i of a word under the upper three of another.
inline uint byte_under(uint word, int i, uint over) { return (over & 0xffffff00u) | ((word >> (8 * i)) & 0xffu); }
inline float exp2_fast(float x) { return std::exp2(x); }
inline float divide_fast(float x, float y) { return x / y; }
inline uint opaque(uint x) { return x; }
inline float times(float a, float b) { return a * b; }
inline float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }

inline uint table_address(emulator::Shared<uint>, uint bytes) { return bytes; }
inline uint table_read(emulator::Shared<uint> table, uint address) { return table[address / 4]; }
inline uint table_read_row(emulator::Shared<uint> table, uint word, int byte, uint address) {
  return table_read(table, (((word >> (8 * byte)) & 255u) << 8) | address);
}
inline void fill_four(emulator::Shared<uint> table, uint i, uint word) {
  for (uint k = 0; k < 4; ++k) table[i + k] = word;
}

inline uint4 read_once(const uint4* p) { return *p; }
inline uint2 read_once(const uint2* p) { return *p; }
inline uint read_once(const uint* p) { return *p; }

template <class T> inline void ask_for(const T* p) { volatile char touched = *(const volatile char*)p; (void)touched; }

#ifdef CUDA_ELEMENTS
constexpr bool PAIRS_DOWN = true;
inline uint row_of(uint lane) { return lane >> 2; }
inline uint pair_of(uint lane) { return lane & 3u; }
inline uint lane_at(uint row, uint pair) { return 4u * row + pair; }
constexpr uint row_mask(int i) { return 4u << i; }
inline uint lane_of_factor(uint k, uint n) { return 4u * n + (k >> 1); }
inline uint element_of_factor(uint k, uint n) { return k & 1u; }
#else
constexpr bool PAIRS_DOWN = false;
inline uint row_of(uint lane) { return ((lane >> 2) & 4u) + ((lane >> 1) & 3u); }
inline uint pair_of(uint lane) { return ((lane >> 2) & 2u) + (lane & 1u); }
inline uint lane_at(uint row, uint pair) { return ((row & 4u) << 2) + ((row & 3u) << 1) + ((pair & 2u) << 2) + (pair & 1u); }
constexpr uint row_mask(int i) { return i == 0 ? 2u : i == 1 ? 4u : 16u; }
inline uint lane_of_factor(uint k, uint n) { return lane_at(k, n >> 1); }
inline uint element_of_factor(uint k, uint n) { return n & 1u; }
#endif

// An 8 x 8 matrix of a result, as the second factor of the next product.
inline uint result_to_factor(uint word, CALLED_AT) {
  const auto words = emulator::exchange(word, emulator::matrix, line);
  uint found = 0;
  for (uint k = 0; k < 8; ++k)
    for (uint n = 0; n < 8; ++n)
      if (lane_of_factor(k, n) == emulator::group().lane()) {
        const uint element = (words[lane_at(k, n / 2)] >> (16 * (n % 2))) & 0xffffu;
        found |= element << (16 * element_of_factor(k, n));
      }
  return found;
}

inline void read_factor(emulator::Shared<half> fragments, uint tile, uint lane, uint* b) {
  for (uint i = 0; i < 2; ++i) {
    const uint at = (tile * 32u + lane) * 4u + 2u * i;
    b[i] = pack_halves(float(half(fragments[at])), float(half(fragments[at + 1])));
  }
}

template <class T> inline float value_of(uint bits) { return half_from_bits(bits); }
template <> inline float value_of<bfloat>(uint bits) { return float(as_type<bfloat>(uint16_t(bits))); }

// c (16 x 8) += a (16 x 16) b (16 x 8), words of two T, sums in float.
template <class T> inline void multiply_pairs(float* c, const uint* a, const uint* b, CALLED_AT) {
  float left[16][16], right[16][8];
  for (uint half_of_k = 0; half_of_k < 2; ++half_of_k) {
    const uint64_t mine = uint64_t(a[2 * half_of_k]) | uint64_t(a[2 * half_of_k + 1]) << 32;
    const auto given = emulator::exchange(mine, emulator::matrix, line);
    for (uint lane = 0; lane < 32; ++lane)
      for (uint e = 0; e < 4; ++e)
        left[row_of(lane) + 8 * (e / 2)][8 * half_of_k + 2 * pair_of(lane) + e % 2] = value_of<T>(uint(given[lane] >> (16 * e)));
  }
  const auto given = emulator::exchange(uint64_t(b[0]) | uint64_t(b[1]) << 32, emulator::matrix, line);
  for (uint k = 0; k < 8; ++k)
    for (uint n = 0; n < 8; ++n)
      for (uint half_of_k = 0; half_of_k < 2; ++half_of_k)
        right[8 * half_of_k + k][n] = value_of<T>(uint(given[lane_of_factor(k, n)] >> (32 * half_of_k + 16 * element_of_factor(k, n))));
  const uint lane = emulator::group().lane(), row = row_of(lane), column = 2 * pair_of(lane);
  for (uint k = 0; k < 16; ++k)
    for (uint i = 0; i < 4; ++i) c[i] += left[row + 8 * (i / 2)][k] * right[k][column + i % 2];
}
inline void multiply(float* c, const uint* a, const uint* b, CALLED_AT) { multiply_pairs<half>(c, a, b, line); }

}  // namespace tq
