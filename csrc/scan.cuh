// Sums over the threads of a block, in their order.
#pragma once

#include "rows.cuh"

// The sum of `mine` over the threads before this one; over all of them in `total`. All threads of a block call it.
__device__ __forceinline__ u32 sum_before(u32 mine, u32* total) {
  __shared__ u32 of_warps[32];
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  u32 sum = mine;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const u32 other = __shfl_up_sync(0xffffffffu, sum, d);
    if (lane >= d) sum += other;
  }
  if (lane == 31) of_warps[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    u32 all = lane < warps ? of_warps[lane] : 0;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const u32 other = __shfl_up_sync(0xffffffffu, all, d);
      if (lane >= d) all += other;
    }
    of_warps[lane] = all;
  }
  __syncthreads();
  const u32 before = (warp ? of_warps[warp - 1] : 0) + sum - mine;
  *total = of_warps[31];
  __syncthreads();
  return before;
}
