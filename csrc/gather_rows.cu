// dst[i] = src[rows[i]] for rows of `width` chunks. A block writes consecutive chunks of dst; each thread has UNROLL
// loads in flight before its first store.
#include "rows.cuh"

#ifndef BLOCK
#define BLOCK 128
#endif
#ifndef UNROLL
#define UNROLL 2
#endif

extern "C" __global__ void __launch_bounds__(BLOCK) gather_rows(
    const chunk* __restrict__ src, chunk* __restrict__ dst, const int* __restrict__ rows, u32 count, u32 width,
    u64 src_stride) {
  const u64 total = (u64)count * width;
  const u64 first = (u64)blockIdx.x * (BLOCK * UNROLL) + threadIdx.x;
  chunk held[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const u64 at = first + u * BLOCK;
    if (at < total) {
      // Loads of normal priority beside streaming stores: 2 % faster than streaming both (measured on an H200).
      // 64-bit division is slow and only huge payloads need it.
      const u32 row = total >> 32 ? (u32)(at / width) : (u32)at / width;
      held[u] = __ldg(src + (u64)rows[row] * src_stride + (at - (u64)row * width));
    }
  }
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const u64 at = first + u * BLOCK;
    if (at < total) store_once(dst + at, held[u]);
  }
}
