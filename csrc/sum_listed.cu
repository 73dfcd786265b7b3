// out[i] = the sum of x[at[i, j]] over j in turn; a negative entry adds nothing. Sums are fp32, and rounded to x's
// elements in the end.
#include "rows.cuh"

#ifndef BLOCK
#define BLOCK 128
#endif

extern "C" __global__ void __launch_bounds__(BLOCK) sum_listed(
    const chunk* __restrict__ x, chunk* __restrict__ out, const int* __restrict__ at, u32 count, u32 each, u32 width) {
  const u64 i = (u64)blockIdx.x * BLOCK + threadIdx.x, total = (u64)count * width;
  if (i >= total) return;
  const u32 row = total >> 32 ? (u32)(i / width) : (u32)i / width;
  const u32 column = (u32)(i - (u64)row * width);
  float sum[PER_CHUNK];
#pragma unroll
  for (int c = 0; c < PER_CHUNK; ++c) sum[c] = 0.f;
#pragma unroll 4
  for (u32 j = 0; j < each; ++j) {
    const int from = at[(u64)row * each + j];
    if (from >= 0) accumulate(load_once(x + (u64)from * width + column), sum);
  }
  store_once(out + i, rounded(sum));
}
