// The part of the Metal Shading Language that the kernels use, for a C++ compiler.
#pragma once
#include <algorithm>
#include <cmath>

#include "simd.h"

typedef unsigned char uchar;
#define ulong uint64_t
#if defined(__aarch64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
typedef __fp16 half;  // g++ 12 has no _Float16 for C++ there
#else
typedef _Float16 half;
#endif
typedef half float16_t;

struct bfloat {
  uint16_t bits;
  bfloat() = default;
  explicit bfloat(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    const bool is_nan = (u & 0x7fffffffu) > 0x7f800000u;
    bits = uint16_t(is_nan ? (u >> 16) | 0x40 : (u + 0x7fff + ((u >> 16) & 1)) >> 16);
  }
  explicit operator float() const {
    const uint32_t u = uint32_t(bits) << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
  }
};
typedef bfloat bfloat16_t;

struct alignas(8) uint2 {
  uint x, y;
};
struct alignas(16) uint4 {
  uint x, y, z, w;
};

#define device
#define constant
#define thread
#define kernel
#define UNROLL

template <class To, class From> inline To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

namespace metal {
inline float exp2(float x) { return std::exp2(x); }
inline float sqrt(float x) { return std::sqrt(x); }
inline float abs(float x) { return std::fabs(x); }
inline float max(float a, float b) { return a > b || b != b ? a : b; }
inline float min(float a, float b) { return a < b || b != b ? a : b; }
inline uint max(uint a, uint b) { return a > b ? a : b; }
inline uint min(uint a, uint b) { return a < b ? a : b; }
}  // namespace metal
using namespace metal;
