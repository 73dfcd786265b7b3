// out[i] = sum of x[rows[j]] for j in [ptr[i], ptr[i + 1]), accumulated in fp32 in that order: bitwise repeatable.
// OUT_FP32 keeps the sums in fp32; otherwise they are rounded once to the input's dtype. A warp makes 32 * UNROLL chunks
// of one row: its list is read once, and the first two contributions of all chunks are in flight together.
#include "rows.cuh"

#ifndef BLOCK
#define BLOCK 128
#endif
#ifndef UNROLL
#define UNROLL 4
#endif
constexpr u32 SPAN = 32 * UNROLL;

__device__ __forceinline__ void put(void* out, u64 at, const float* sum) {
#if defined(OUT_FP32) && !defined(DTYPE_FP32)
  float* target = (float*)out + at * PER_CHUNK;
#if ACCESS == 16
  __stcs((float4*)target, make_float4(sum[0], sum[1], sum[2], sum[3]));
  __stcs((float4*)target + 1, make_float4(sum[4], sum[5], sum[6], sum[7]));
#else
#pragma unroll
  for (int i = 0; i < PER_CHUNK; ++i) target[i] = sum[i];
#endif
#else
  store_once((chunk*)out + at, rounded(sum));
#endif
}

extern "C" __global__ void __launch_bounds__(BLOCK) sum_rows(
    const chunk* __restrict__ x, void* __restrict__ out, const int* __restrict__ ptr, const int* __restrict__ rows,
    u32 count, u32 width) {
  const u32 parts = (width + SPAN - 1) / SPAN, unit = (blockIdx.x * BLOCK + threadIdx.x) / 32, row = unit / parts;
  if (row >= count) return;
  const u32 c0 = (unit - row * parts) * SPAN + threadIdx.x % 32;
  const int begin = ptr[row], end = ptr[row + 1];
  chunk first[UNROLL], second[UNROLL];
  if (begin < end) {
    const chunk* from = x + (u64)rows[begin] * width;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (c0 + 32 * u < width) first[u] = load_once(from + c0 + 32 * u);
  }
  if (begin + 1 < end) {
    const chunk* from = x + (u64)rows[begin + 1] * width;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
      if (c0 + 32 * u < width) second[u] = load_once(from + c0 + 32 * u);
  }
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    if (c0 + 32 * u >= width) continue;
    float sum[PER_CHUNK];
#pragma unroll
    for (int i = 0; i < PER_CHUNK; ++i) sum[i] = 0.f;
    if (begin < end) accumulate(first[u], sum);
    if (begin + 1 < end) accumulate(second[u], sum);
    for (int j = begin + 2; j < end; ++j) accumulate(load_once(x + (u64)rows[j] * width + c0 + 32 * u), sum);
    put(out, (u64)row * width + c0 + 32 * u, sum);
  }
}
