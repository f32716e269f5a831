// Declarations for clang's front end alone, which Metal's is made of: MSL's address spaces are real here, so that a
// pointer into the wrong one is an error. Nothing is defined; nothing is run.
typedef __SIZE_TYPE__ size_t;
typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef unsigned long ulong;
typedef unsigned char uint8_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef _Float16 half;
typedef half float16_t;
typedef __bf16 bfloat;
typedef bfloat bfloat16_t;
typedef uint uint2 __attribute__((ext_vector_type(2)));
typedef uint uint3 __attribute__((ext_vector_type(3)));
typedef uint uint4 __attribute__((ext_vector_type(4)));

#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define INFINITY __builtin_inff()
#define UNROLL _Pragma("clang loop unroll(full)")
#define SHARED(T, name, n) static threadgroup T name[n]
#define SHARED_AT_LAUNCH(T, name, n) SHARED(T, name, n)
#define SHARED_POINTER(T) threadgroup T*

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
template <class T> T simd_sum(T);
template <class T> T simd_max(T);
template <class T> T simd_min(T);
template <class T> T simd_shuffle(T, ushort);
template <class T> T simd_shuffle_xor(T, ushort);
bool simd_any(bool);
template <class To, class From> To as_type(From);
namespace metal {
float sqrt(float);
float abs(float);
float max(float, float);
float min(float, float);
uint max(uint, uint);
uint min(uint, uint);
}  // namespace metal
using namespace metal;

namespace tq {
uint pack_halves(float, float);
uint pack_bfloats(float, float);
uint low_halves(uint, uint);
uint high_halves(uint, uint);
uint double_bytes(uint);
uint halves_at(uint, uint, uint);
float low_half(uint);
float high_half(uint);
uint times_half(uint, uint, int);
uint sixteenths(uint, int);
uint bits_under(uint, uint, uint);
uint byte_under(uint, int, uint);
float exp2_fast(float);
float divide_fast(float, float);
uint opaque(uint);
float times(float, float);
float multiply_add(float, float, float);
uint table_address(threadgroup uint*, uint);
uint table_read(threadgroup uint*, uint);
uint table_read_row(threadgroup uint*, uint, int, uint);
void fill_four(threadgroup uint*, uint, uint);
uint row_of(uint);
uint pair_of(uint);
uint lane_at(uint, uint);
constexpr uint row_mask(int i) { return 2u << i; }
uint lane_of_factor(uint, uint);
uint element_of_factor(uint, uint);
uint result_to_factor(uint);
void read_factor(const threadgroup half*, uint, uint, thread uint*);
void multiply(thread float*, const thread uint*, const thread uint*);
template <class T> void multiply_pairs(thread float*, const thread uint*, const thread uint*);
uint4 read_once(const device uint4*);
uint2 read_once(const device uint2*);
uint read_once(const device uint*);
constexpr bool PAIRS_DOWN = false;
template <class T> void ask_for(const device T*);
}  // namespace tq
