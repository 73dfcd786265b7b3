// What the row kernels share. Rows are moved in chunks of ACCESS bytes. Kernels that do arithmetic are compiled with a
// macro that names the elements: DTYPE_BF16, DTYPE_FP16 or DTYPE_FP32 ("of DTYPE").
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Half precision by hand: NVRTC alone has no cuda_bf16.h, and two conversions are all that is needed.
#if defined(DTYPE_BF16)
typedef unsigned short elem;
__device__ __forceinline__ float widen(elem x) { return __uint_as_float((u32)x << 16); }
__device__ __forceinline__ elem narrow(float x) {
  elem y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
#elif defined(DTYPE_FP16)
typedef unsigned short elem;
__device__ __forceinline__ float widen(elem x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
__device__ __forceinline__ elem narrow(float x) {
  elem y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
#elif defined(DTYPE_FP32)
typedef float elem;
__device__ __forceinline__ float widen(elem x) { return x; }
__device__ __forceinline__ elem narrow(float x) { return x; }
#endif

// The widest load and store that rows allow: ACCESS divides the size and the address of every row.
#ifndef ACCESS
#define ACCESS 16
#endif
#if ACCESS == 16
typedef uint4 chunk;
#elif ACCESS == 8
typedef uint2 chunk;
#elif ACCESS == 4
typedef u32 chunk;
#else
typedef unsigned short chunk;
#endif

#if defined(DTYPE_BF16) || defined(DTYPE_FP16) || defined(DTYPE_FP32)
constexpr int PER_CHUNK = sizeof(chunk) / sizeof(elem);

union lanes {
  chunk bits;
  elem at[PER_CHUNK];
};

__device__ __forceinline__ void accumulate(chunk bits, float* sum) {
  lanes x;
  x.bits = bits;
#pragma unroll
  for (int i = 0; i < PER_CHUNK; ++i) sum[i] += widen(x.at[i]);
}

__device__ __forceinline__ chunk rounded(const float* sum) {
  lanes x;
#pragma unroll
  for (int i = 0; i < PER_CHUNK; ++i) x.at[i] = narrow(sum[i]);
  return x.bits;
}
#endif

#if defined(MXINT15)
// A format for parts of gradients that other ranks add up: 16 bits per number, and nearer to fp32 than bf16 is. As in
// the microscaling formats (MX) of the OCP, 8 neighbours share an 8-bit exponent:
//
//   element i of 8     bits 15..1: a whole number of steps, signed     bit 0: bit i of the shared exponent
//
// The exponent is that of the largest of the 8, and a step is 2^-13 of the power of two that it stands for. Where one
// of the 8 is NaN or infinite all become NaN. Where the largest is below 2^-113 a step is 2^-126.
constexpr u32 STEPS = 140;  // the (biased) exponent whose step is 1: 127 + 13

__device__ __forceinline__ chunk to_mxint15(const float* part) {
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < PER_CHUNK; ++i) largest = max(largest, __float_as_uint(part[i]) & 0x7fffffffu);
  const u32 exponent = max(largest >> 23, 14u);
  const float per_step = __uint_as_float((127 + STEPS - exponent) << 23);
  lanes x;
#pragma unroll
  for (int i = 0; i < PER_CHUNK; ++i) {
    const int steps = exponent < 255 ? max(-0x3fff, min(__float2int_rn(part[i] * per_step), 0x3fff)) : 0;
    x.at[i] = (elem)(steps * 2 | (exponent >> i & 1));
  }
  return x.bits;
}

__device__ __forceinline__ void accumulate_part(chunk bits, float* sum) {
  lanes x;
  x.bits = bits;
  u32 exponent = 0;
#pragma unroll
  for (int i = 0; i < PER_CHUNK; ++i) exponent |= (x.at[i] & 1u) << i;
  const float step = __uint_as_float(exponent < 255 ? (127 + exponent - STEPS) << 23 : 0x7fffffffu);
#pragma unroll
  for (int i = 0; i < PER_CHUNK; ++i) sum[i] += (float)((short)x.at[i] >> 1) * step;
}
#elif defined(DTYPE_BF16) || defined(DTYPE_FP16) || defined(DTYPE_FP32)
__device__ __forceinline__ void accumulate_part(chunk bits, float* sum) { accumulate(bits, sum); }
#endif

// For data that is read once, or written and not read again soon: it should not push other data out of the caches.
__device__ __forceinline__ chunk load_once(const chunk* p) { return __ldcs(p); }
__device__ __forceinline__ void store_once(chunk* p, chunk x) { __stcs(p, x); }
