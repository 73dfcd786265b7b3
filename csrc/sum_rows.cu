// out[i] = x[rows[2 i]] + x[rows[2 i + 1]] (a negative index adds nothing) + the sum of x[rows[j]] over j in [ptr[i],
// ptr[i + 1]). Sums are fp32 and added in that order, so they are bitwise repeatable. Few rows have more than two
// summands: the first two have fixed places, where a thread finds them before it knows ptr (2 to 3 % faster than one
// list for all, measured on an H200).
#include "rows.cuh"

#ifndef BLOCK
#define BLOCK 64
#endif
#ifndef UNROLL
#define UNROLL 2
#endif

// Zeros where there is nothing to load. A predicate, not a branch: all UNROLL chunks of a thread are in flight
// together.
__device__ __forceinline__ chunk load_if(bool there, const chunk* p) {
#if ACCESS == 16
  chunk x;
  asm volatile(
      "{\n"
      ".reg .pred there;\n"
      "setp.ne.u32 there, %5, 0;\n"
      "mov.u32 %0, 0;\n"
      "mov.u32 %1, 0;\n"
      "mov.u32 %2, 0;\n"
      "mov.u32 %3, 0;\n"
      "@there ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
      : "l"(p), "r"((u32)there));
  return x;
#else
  return there ? load_once(p) : chunk();
#endif
}

// Chunk `at` of the result. All threads of a warp call it, those past the end, too.
__device__ __forceinline__ void store_sum(void* out, u64 at, u64 total, const float* sum) {
#if defined(DTYPE_FP32)
  if (at < total) store_once((chunk*)out + at, rounded(sum));
#elif ACCESS == 16
  // Neighbour threads swap halves of their 8 sums: each store of a warp then fills the sectors that it touches.
  const bool odd = at & 1;
  float4 keeps = make_float4(sum[0], sum[1], sum[2], sum[3]), gives = make_float4(sum[4], sum[5], sum[6], sum[7]);
  if (odd) {
    const float4 swap = keeps;
    keeps = gives, gives = swap;
  }
  gives.x = __shfl_xor_sync(0xffffffffu, gives.x, 1);
  gives.y = __shfl_xor_sync(0xffffffffu, gives.y, 1);
  gives.z = __shfl_xor_sync(0xffffffffu, gives.z, 1);
  gives.w = __shfl_xor_sync(0xffffffffu, gives.w, 1);
  float4* target = (float4*)out + 2 * (at - odd) + odd;
  if (at - odd < total) __stcs(target, odd ? gives : keeps);
  if (at - odd + 1 < total) __stcs(target + 2, odd ? keeps : gives);
#else
  if (at < total)
#pragma unroll
    for (int i = 0; i < PER_CHUNK; ++i) ((float*)out)[at * PER_CHUNK + i] = sum[i];
#endif
}

extern "C" __global__ void __launch_bounds__(BLOCK) sum_rows(
    const chunk* __restrict__ x, void* __restrict__ out, const int* __restrict__ ptr, const int* __restrict__ rows,
    u32 count, u32 width) {
  const u64 total = (u64)count * width;
  const u64 first = (u64)blockIdx.x * (BLOCK * UNROLL) + threadIdx.x;
  int begin[UNROLL], end[UNROLL];
  int2 pair[UNROLL];
  u32 column[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const u64 at = first + u * BLOCK;
    begin[u] = end[u] = 0;
    pair[u] = make_int2(-1, -1);
    column[u] = 0;
    if (at < total) {
      const u32 row = total >> 32 ? (u32)(at / width) : (u32)at / width;
      column[u] = (u32)(at - (u64)row * width);
      pair[u] = ((const int2*)rows)[row];
      begin[u] = ptr[row];
      end[u] = ptr[row + 1];
    }
  }
  chunk head[UNROLL], next[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    head[u] = load_if(pair[u].x >= 0, x + (u64)(u32)pair[u].x * width + column[u]);
    next[u] = load_if(pair[u].y >= 0, x + (u64)(u32)pair[u].y * width + column[u]);
  }
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const u64 at = first + u * BLOCK;
#if defined(DTYPE_FP32)
    if (pair[u].y < 0) {
      // The sum of one row is that row.
      if (at < total) store_once((chunk*)out + at, head[u]);
      continue;
    }
#endif
    float sum[PER_CHUNK];
#pragma unroll
    for (int i = 0; i < PER_CHUNK; ++i) sum[i] = 0.f;
    accumulate(head[u], sum);
    accumulate(next[u], sum);
    for (int j = begin[u]; j < end[u]; ++j) accumulate(load_once(x + (u64)rows[j] * width + column[u]), sum);
    store_sum(out, at, total, sum);
  }
}
