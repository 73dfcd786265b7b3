// out[i] = sum of x[rows[j]] for j in [ptr[i], ptr[i + 1]), accumulated in fp32 in that order: bitwise repeatable.
// OUT_FP32 keeps the sums in fp32; otherwise they are rounded once to the input's dtype.
#include "rows.cuh"

#ifndef BLOCK
#define BLOCK 128
#endif
#ifndef UNROLL
#define UNROLL 2
#endif

extern "C" __global__ void __launch_bounds__(BLOCK) sum_rows(
    const chunk* __restrict__ x, void* __restrict__ out, const int* __restrict__ ptr, const int* __restrict__ rows,
    u32 count, u32 width) {
  const u64 total = (u64)count * width;
  const u64 first = (u64)blockIdx.x * (BLOCK * UNROLL) + threadIdx.x;
  int begin[UNROLL], end[UNROLL];
  u32 column[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const u64 at = first + u * BLOCK;
    begin[u] = end[u] = 0;
    column[u] = 0;
    if (at < total) {
      const u32 row = total >> 32 ? (u32)(at / width) : (u32)at / width;
      column[u] = (u32)(at - (u64)row * width);
      begin[u] = ptr[row];
      end[u] = ptr[row + 1];
    }
  }
  // Most rows have one contribution or two: these loads of all UNROLL chunks are in flight together.
  chunk head[UNROLL], next[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    if (begin[u] < end[u]) head[u] = load_once(x + (u64)rows[begin[u]] * width + column[u]);
    if (begin[u] + 1 < end[u]) next[u] = load_once(x + (u64)rows[begin[u] + 1] * width + column[u]);
  }
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    float sum[PER_CHUNK];
#pragma unroll
    for (int i = 0; i < PER_CHUNK; ++i) sum[i] = 0.f;
    if (begin[u] < end[u]) accumulate(head[u], sum);
    if (begin[u] + 1 < end[u]) accumulate(next[u], sum);
    for (int j = begin[u] + 2; j < end[u]; ++j) accumulate(load_once(x + (u64)rows[j] * width + column[u]), sum);
    const u64 at = first + u * BLOCK;
    if (at >= total) continue;
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
    // The sum of one row is that row.
    store_once((chunk*)out + at, begin[u] + 1 == end[u] ? head[u] : rounded(sum));
#endif
  }
}
