// Words, types and functions of CUDA that wait for no thread, for kernels that run on the CPU.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
using std::max, std::min;

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct uint4 {
  uint32_t x, y, z, w;
};
struct uint2 {
  uint32_t x, y;
};
inline float __uint_as_float(uint32_t x) {
  float y;
  memcpy(&y, &x, 4);
  return y;
}
inline uint32_t __float_as_uint(float x) {
  uint32_t y;
  memcpy(&y, &x, 4);
  return y;
}
// As the PTX statement: to the nearest, to even; 0x7fff of NaN.
inline uint16_t to_bf16(float x) {
  const uint32_t bits = __float_as_uint(x);
  return x != x ? 0x7fff : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
template <class T>
T __ldcs(const T* at) {
  return *at;
}
template <class T>
void __stcs(T* at, T value) {
  *at = value;
}
