// out[token, j] = found[at[token, rank of choice j], j], in 4 bytes; 0 where no rank has the choice.
#include "rows.cuh"

#ifndef BLOCK
#define BLOCK 256
#endif

extern "C" __global__ void __launch_bounds__(BLOCK) pick_choices(
    const u32* __restrict__ found, const int* __restrict__ at, const i64* __restrict__ chosen, u32* __restrict__ out,
    u32 tokens, u32 each, u32 own, u32 ranks) {
  const u64 i = (u64)blockIdx.x * BLOCK + threadIdx.x;
  if (i >= (u64)tokens * each) return;
  const i64 e = chosen[i];
  const bool there = e >= 0 && e < (i64)own * ranks;
  out[i] = there ? found[(u64)at[i / each * ranks + e / own] * each + i % each] : 0;
}
