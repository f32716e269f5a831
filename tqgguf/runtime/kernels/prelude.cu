// The Metal words of the kernels' text for CUDA (NVRTC, device code by default), and what it needs beyond MSL.
typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef unsigned long ulong;
typedef __nv_bfloat16 bfloat;
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#define device
#define constant
#define thread
#define threadgroup
#define UNROLL _Pragma("unroll")
#define SHARED(T, name, n) __shared__ __align__(16) T name[n]
// What the launch gives: more than the 48 KB that can be declared. It lies behind what is declared, at SHARED_PLACE (launch.py):
// a constant, so that it is part of a read instead of being added to every address; never elsewhere unnoticed.
#ifndef SHARED_PLACE
#define SHARED_PLACE 0
#endif
#define SHARED_AT_LAUNCH(T, name, n)                                                \
  extern __shared__ __align__(16) uint shared_at_launch[];                           \
  if (SHARED_PLACE - (uint)__cvta_generic_to_shared(shared_at_launch) > 1024u) __trap(); \
  T* const name = (T*)__cvta_shared_to_generic(SHARED_PLACE)
#define SHARED_POINTER(T) T*

#define threadgroup_position_in_grid (make_uint3(blockIdx.x, blockIdx.y, blockIdx.z))
#define threadgroups_per_grid (make_uint3(gridDim.x, gridDim.y, gridDim.z))
#define thread_index_in_threadgroup (threadIdx.x)
#define thread_index_in_simdgroup (threadIdx.x & 31u)
#define simdgroup_index_in_threadgroup (threadIdx.x >> 5)

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
inline void threadgroup_barrier(mem_flags) { __syncthreads(); }
inline void simdgroup_barrier(mem_flags) { __syncwarp(); }
template <class T> inline T simd_shuffle_xor(T v, ushort mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
template <class T> inline T simd_shuffle(T v, ushort lane) { return __shfl_sync(0xffffffffu, v, lane); }
inline bool simd_any(bool v) { return __any_sync(0xffffffffu, v); }
template <class To, class From> inline To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}
namespace metal {
inline float sqrt(float x) { return ::sqrtf(x); }
inline float abs(float x) { return ::fabsf(x); }
inline float max(float a, float b) { return ::fmaxf(a, b); }  // one instruction instead of compare and select
inline float min(float a, float b) { return ::fminf(a, b); }
inline uint max(uint a, uint b) { return ::umax(a, b); }
inline uint min(uint a, uint b) { return ::umin(a, b); }
}  // namespace metal
template <class T> inline T simd_sum(T v) {
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
  return v;
}
template <class T> inline T simd_max(T v) {
  for (int o = 16; o; o >>= 1) v = metal::max(v, __shfl_xor_sync(0xffffffffu, v, o));
  return v;
}
template <class T> inline T simd_min(T v) {
  for (int o = 16; o; o >>= 1) v = metal::min(v, __shfl_xor_sync(0xffffffffu, v, o));
  return v;
}

namespace tq {

__forceinline__ uint pack_halves(float low, float high) {
  uint word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
__forceinline__ uint pack_bfloats(float low, float high) {
  uint word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
__forceinline__ uint low_halves(uint x, uint y) { return __byte_perm(x, y, 0x5410); }
__forceinline__ uint high_halves(uint x, uint y) { return __byte_perm(x, y, 0x7632); }
__forceinline__ uint double_bytes(uint x) { return __byte_perm(x, 0u, 0x1100); }
// The low halves of both for 0, the high ones for 1.
__forceinline__ uint halves_at(uint x, uint y, uint which) { return __byte_perm(x, y, 0x5410u + 0x2222u * which); }
__forceinline__ __half2 as_halves(uint x) { return *(const __half2*)&x; }
__forceinline__ float low_half(uint x) { return __low2float(as_halves(x)); }
__forceinline__ float high_half(uint x) { return __high2float(as_halves(x)); }
// Two f16 times one of another two.
__forceinline__ uint times_half(uint x, uint y, int which) {
  const __half2 product = __hmul2(as_halves(x), which ? __high2half2(as_halves(y)) : __low2half2(as_halves(y)));
  return *(const uint*)&product;
}
// Two signed bytes of a word, the first two for 0, as f16 over 16. As the low byte of an f16 of 64 to 80 a byte is sixteenths.
__forceinline__ uint sixteenths(uint word, int which) {
  const uint moved = __byte_perm(word ^ 0x80808080u, 0x54545454u, which ? 0x4342u : 0x4140u);
  const __half2 halves = __hsub2(as_halves(moved), as_halves(0x54805480u));
  return *(const uint*)&halves;
}
// Bits of a word under those of another: one instruction, for which both numbers must be in registers.
__forceinline__ uint bits_under(uint word, uint mask, uint over) {
  uint found;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(found) : "r"(word), "r"(mask), "r"(over));
  return found;
}
// Byte i of a word under the upper three of another.
__forceinline__ uint byte_under(uint word, int i, uint over) { return __byte_perm(word, over, 0x7650u + uint(i)); }
__forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__forceinline__ float times(float a, float b) { return __fmul_rn(a, b); }
__forceinline__ float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__forceinline__ float divide_fast(float x, float y) { return __fdividef(x, y); }
// Keeps a value in a register: ptxas would make it anew at every use.
__forceinline__ uint opaque(uint x) {
  asm volatile("" : "+r"(x));
  return x;
}

__forceinline__ uint table_address(uint* table, uint bytes) { return bytes; }
__forceinline__ uint table_read(uint* table, uint address) {
  uint word;
  asm("ld.shared.u32 %0, [%1 + %2];" : "=r"(word) : "r"(address), "n"(SHARED_PLACE));
  return word;
}
// At the row of 256 bytes that a byte of a word says; address: within the row.
__forceinline__ uint table_read_row(uint* table, uint word, int byte, uint address) {
  return table_read(table, __byte_perm(word, address, 0x7604u + 16u * byte));
}
__forceinline__ void fill_four(uint* table, uint i, uint word) { *(uint4*)(table + i) = make_uint4(word, word, word, word); }

// What is read once and by nobody else: it takes no place in the first cache, where others' data is.
__forceinline__ uint4 read_once(const uint4* p) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__forceinline__ uint2 read_once(const uint2* p) {
  uint2 v;
  asm("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
__forceinline__ uint read_once(const uint* p) {
  uint v;
  asm("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}

__forceinline__ void ask_for(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }  // what will be read soon

// Elements as the tensor cores' m16n8k16 has them. A second factor's lane holds two neighbours down a column.
__forceinline__ uint row_of(uint lane) { return lane >> 2; }
__forceinline__ uint pair_of(uint lane) { return lane & 3u; }
__forceinline__ uint lane_at(uint row, uint pair) { return 4u * row + pair; }
constexpr uint row_mask(int i) { return 4u << i; }
constexpr bool PAIRS_DOWN = true;  // a second factor's lane holds neighbours down a column
__forceinline__ uint lane_of_factor(uint k, uint n) { return 4u * n + (k >> 1); }
__forceinline__ uint element_of_factor(uint k, uint n) { return k & 1u; }
__forceinline__ uint result_to_factor(uint word) {
  uint turned;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(word));
  return turned;
}
__forceinline__ void read_factor(const half* fragments, uint tile, uint lane, uint* b) {
  const uint2 words = ((const uint2*)fragments)[tile * 32u + lane];
  b[0] = words.x;
  b[1] = words.y;
}
#define MULTIPLY(NAME, TYPES)                                                                                   \
  __forceinline__ void NAME(float* c, const uint* a, const uint* b) {                                           \
    asm("mma.sync.aligned.m16n8k16.row.col." TYPES " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"       \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                        \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                                    \
  }
MULTIPLY(multiply, "f32.f16.f16.f32")
MULTIPLY(multiply_bfloats, "f32.bf16.bf16.f32")
// Words of two T.
template <class T> __forceinline__ void multiply_pairs(float* c, const uint* a, const uint* b) { multiply(c, a, b); }
template <> __forceinline__ void multiply_pairs<bfloat>(float* c, const uint* a, const uint* b) { multiply_bfloats(c, a, b); }

}  // namespace tq
