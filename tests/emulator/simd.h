// MSL's simd operations and barriers. Every one knows the line of the kernel's text that called it.
#pragma once
#include "shared_memory.h"

typedef unsigned short ushort;
#define CALLED_AT uint line = __builtin_LINE()

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
inline void threadgroup_barrier(mem_flags, CALLED_AT) { emulator::group().wait(emulator::State::at_barrier, emulator::none, line); }
inline void simdgroup_barrier(mem_flags, CALLED_AT) { emulator::group().wait(emulator::State::at_simd_operation, emulator::simd_barrier, line); }

namespace emulator {

// What all lanes give in one operation.
template <class T> struct Given {
  const unsigned char (*slots)[8];
  T operator[](uint lane) const {
    T value;
    memcpy(&value, slots[lane], sizeof(T));
    return value;
  }
};

template <class T> inline Given<T> exchange(T value, Operation operation, uint line) {
  static_assert(sizeof(T) <= 8, "lanes exchange up to 8 bytes");
  Threadgroup& g = group();
  Thread& me = *g.current;
  auto& slots = g.simdgroup().given[me.n_exchanges++ % 2];
  memcpy(slots[g.lane()], &value, sizeof(T));
  g.wait(State::at_simd_operation, operation, line);
  return {slots};
}

template <class T, class Join> inline T reduce(T value, uint line, Join join) {
  const Given<T> given = exchange(value, reduction, line);
  T parts[LANES];
  for (uint i = 0; i < LANES; ++i) parts[i] = given[i];
  for (uint width = LANES / 2; width; width /= 2)
    for (uint i = 0; i < width; ++i) parts[i] = join(parts[i], parts[i + width]);
  return parts[0];
}

}  // namespace emulator

template <class T> inline T simd_sum(T v, CALLED_AT) {
  return emulator::reduce(v, line, [](T a, T b) { return T(a + b); });
}
template <class T> inline T simd_max(T v, CALLED_AT) {
  return emulator::reduce(v, line, [](T a, T b) { return a > b ? a : b; });
}
template <class T> inline T simd_min(T v, CALLED_AT) {
  return emulator::reduce(v, line, [](T a, T b) { return a < b ? a : b; });
}
inline bool simd_any(bool v, CALLED_AT) {
  return emulator::reduce(uint(v), line, [](uint a, uint b) { return a | b; }) != 0;
}
template <class T> inline T simd_shuffle(T v, ushort from, CALLED_AT) {
  if (from >= emulator::LANES) emulator::stop("simd_shuffle from lane %u at line %u", uint(from), line);
  return emulator::exchange(v, emulator::shuffle, line)[from];
}
template <class T> inline T simd_shuffle_xor(T v, ushort mask, CALLED_AT) {
  const uint lane = emulator::group().lane();
  return emulator::exchange(v, emulator::shuffle_xor, line)[lane ^ mask];
}
