// What the kernels' text needs beyond MSL, in Metal's words. MLX has put <metal_stdlib> and its own types before it.
#include <metal_simdgroup_matrix>
#define UNROLL _Pragma("clang loop unroll(full)")
#define SHARED(T, name, n) threadgroup T name[n] __attribute__((aligned(16)))
#define SHARED_AT_LAUNCH(T, name, n) SHARED(T, name, n)
#define SHARED_POINTER(T) threadgroup T*
namespace tq {

// Two f16 in a word, the first in the low half.
inline uint pack_halves(float low, float high) { return as_type<uint>(half2(half(low), half(high))); }
inline uint pack_bfloats(float low, float high) {
  return uint(as_type<ushort>(bfloat(low))) | uint(as_type<ushort>(bfloat(high))) << 16;
}
inline uint low_halves(uint x, uint y) { return (x & 0xffffu) | (y << 16); }
inline uint high_halves(uint x, uint y) { return (x >> 16) | (y & 0xffff0000u); }
inline uint double_bytes(uint x) { return (x & 0xffu) * 0x0101u | ((x >> 8) & 0xffu) * 0x01010000u; }  // of 16 bits: a a b b
inline uint halves_at(uint x, uint y, uint which) { return which ? high_halves(x, y) : low_halves(x, y); }  // low ones for 0
inline float low_half(uint x) { return float(as_type<half2>(x).x); }
inline float high_half(uint x) { return float(as_type<half2>(x).y); }
inline uint times_half(uint x, uint y, int which) {  // two f16 times one of another two
  return as_type<uint>(as_type<half2>(x) * (which ? as_type<half2>(y).y : as_type<half2>(y).x));
}
inline uint sixteenths(uint word, int which) {  // two signed bytes of a word, the first two for 0, as f16 over 16
  const char4 bytes = as_type<char4>(word);
  return as_type<uint>(half2(which ? bytes.zw : bytes.xy) * 0.0625h);
}
inline uint bits_under(uint word, uint mask, uint over) { return (word & mask) | over; }
// Byte i of a word under the upper three of another.
inline uint byte_under(uint word, int i, uint over) { return (over & 0xffffff00u) | ((word >> (8 * i)) & 0xffu); }
inline float exp2_fast(float x) { return metal::fast::exp2(x); }
inline float divide_fast(float x, float y) { return metal::fast::divide(x, y); }
inline uint opaque(uint x) { return x; }
inline float times(float a, float b) { return a * b; }  // rounded before anything is added to it
inline float multiply_add(float a, float b, float c) { return metal::fma(a, b, c); }  // rounded once

// Tables in threadgroup memory are read at byte addresses, made once for each lane.
inline uint table_address(threadgroup uint* table, uint bytes) { return bytes; }
inline uint table_read(threadgroup uint* table, uint address) {
  return *(const threadgroup uint*)((const threadgroup char*)table + address);
}
// At the row that a byte of a word says.
inline uint table_read_row(threadgroup uint* table, uint word, int byte, uint address) {
  return table_read(table, (((word >> (8 * byte)) & 255u) << 8) | address);
}
inline void fill_four(threadgroup uint* table, uint i, uint word) { *(threadgroup uint4*)(table + i) = uint4(word); }

// What is read once: a hint to caches elsewhere.
inline uint4 read_once(const device uint4* p) { return *p; }
inline uint2 read_once(const device uint2* p) { return *p; }
inline uint read_once(const device uint* p) { return *p; }

template <class T> inline void ask_for(const device T*) {}  // what will be read soon

// The elements of an 8 x 8 matrix that a lane holds: (row, 2 * pair) and (row, 2 * pair + 1), as MLX's own matrix
// kernels rely on (steel/gemm/mma.h, get_coord).
inline uint row_of(uint lane) { return ((lane >> 2) & 4u) + ((lane >> 1) & 3u); }
inline uint pair_of(uint lane) { return ((lane >> 2) & 2u) + (lane & 1u); }
inline uint lane_at(uint row, uint pair) { return ((row & 4u) << 2) + ((row & 3u) << 1) + ((pair & 2u) << 2) + (pair & 1u); }
constexpr uint row_mask(int i) { return i == 0 ? 2u : i == 1 ? 4u : 16u; }  // lanes of one pair differ by these
constexpr bool PAIRS_DOWN = false;  // a second factor's lane holds neighbours of a row
// Which lane holds element (k, n) of a second factor, and as which of its two.
inline uint lane_of_factor(uint k, uint n) { return lane_at(k, n >> 1); }
inline uint element_of_factor(uint k, uint n) { return n & 1u; }
inline uint result_to_factor(uint word) { return word; }
inline void read_factor(const threadgroup half* fragments, uint tile, uint lane, thread uint* b) {
  const uint2 words = ((const threadgroup uint2*)fragments)[tile * 32u + lane];
  b[0] = words.x;
  b[1] = words.y;
}

template <class T> inline void multiply_tile(thread float* c, uint a, uint b) {
  simdgroup_matrix<T, 8, 8> A, B;
  simdgroup_matrix<float, 8, 8> C;
  A.thread_elements()[0] = as_type<T>(ushort(a));
  A.thread_elements()[1] = as_type<T>(ushort(a >> 16));
  B.thread_elements()[0] = as_type<T>(ushort(b));
  B.thread_elements()[1] = as_type<T>(ushort(b >> 16));
  C.thread_elements()[0] = c[0];
  C.thread_elements()[1] = c[1];
  simdgroup_multiply_accumulate(C, A, B, C);
  c[0] = C.thread_elements()[0];
  c[1] = C.thread_elements()[1];
}
// c (16 x 8) += a (16 x 16) b (16 x 8), words of two T. a: rows 0-7 and 8-15 of columns 0-7, the same of columns 8-15.
template <class T> inline void multiply_pairs(thread float* c, const thread uint* a, const thread uint* b) {
  multiply_tile<T>(c, a[0], b[0]);
  multiply_tile<T>(c, a[2], b[1]);
  multiply_tile<T>(c + 2, a[1], b[0]);
  multiply_tile<T>(c + 2, a[3], b[1]);
}
inline void multiply(thread float* c, const thread uint* a, const thread uint* b) { multiply_pairs<half>(c, a, b); }

}  // namespace tq
