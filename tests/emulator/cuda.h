// Declarations for clang's front end alone: what MLX's and CUDA's headers give to a custom CUDA kernel, as far as the
// kernels use it. Nothing is defined; nothing is run.
typedef __SIZE_TYPE__ size_t;
typedef unsigned char uint8_t;
typedef int int32_t;
typedef unsigned int uint32_t;
struct __half {
  __half() = default;
  __half(float);
  operator float() const;
  unsigned short bits;
};
typedef __half half;
struct __nv_bfloat16 {
  __nv_bfloat16() = default;
  __nv_bfloat16(float);
  operator float() const;
  unsigned short bits;
};
struct uint2 {
  unsigned x, y;
};
struct uint3 {
  unsigned x, y, z;
};
struct uint4 {
  unsigned x, y, z, w;
};
uint3 make_uint3(unsigned, unsigned, unsigned);
uint4 make_uint4(unsigned, unsigned, unsigned, unsigned);
extern const uint3 blockIdx, gridDim, threadIdx, blockDim;
#define __global__
#define __shared__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __forceinline__ inline
void __syncthreads();
void __syncwarp();
template <class T> T __shfl_xor_sync(unsigned, T, int);
template <class T> T __shfl_sync(unsigned, T, int);
int __any_sync(unsigned, int);
unsigned __byte_perm(unsigned, unsigned, unsigned);
float __int_as_float(int);
float __half2float(__half);
struct __half2 {
  __half x, y;
};
float __low2float(__half2);
float __high2float(__half2);
__half2 __low2half2(__half2);
__half2 __high2half2(__half2);
__half2 __hmul2(__half2, __half2);
__half2 __hsub2(__half2, __half2);
void __trap();
size_t __cvta_generic_to_shared(const void*);
void* __cvta_shared_to_generic(size_t);
extern "C" void* memcpy(void*, const void*, size_t);
float __fmul_rn(float, float);
float __fmaf_rn(float, float, float);
float __fdividef(float, float);
float sqrtf(float);
float fabsf(float);
float fmaxf(float, float);
float fminf(float, float);
unsigned umax(unsigned, unsigned);
unsigned umin(unsigned, unsigned);
