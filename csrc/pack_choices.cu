// What each rank is sent beside its tokens' rows, rank after rank: of each row its token, and its choices, as numbers
// among the experts of that rank (own: of none of these), with their weights (0 there), in bits. `at` counts on from
// rank to rank then. A thread for each token and rank.
#include "rows.cuh"

#ifndef BLOCK
#define BLOCK 256
#endif

extern "C" __global__ void __launch_bounds__(BLOCK) pack_choices(
    const i64* __restrict__ chosen, const float* __restrict__ weight, const i64* __restrict__ counts,
    int* __restrict__ at, int* __restrict__ token, int* __restrict__ packed, u32 tokens, u32 each, u32 own, u32 ranks) {
  const u64 i = (u64)blockIdx.x * BLOCK + threadIdx.x;
  if (i >= (u64)tokens * ranks) return;
  const int place = at[i];
  if (place < 0) return;
  const u32 n = (u32)(i / ranks), rank = (u32)(i % ranks), width = 1 + own + ranks;
  u64 row = place;
  for (u32 r = 0; r < rank; ++r) row += counts[(u64)r * width];
  at[i] = (int)row;
  token[row] = (int)n;
  int* to = packed + row * 2 * each;
  for (u32 j = 0; j < each; ++j) {
    const i64 e = chosen[(u64)n * each + j] - (i64)rank * own;
    const bool mine = e >= 0 && e < own;
    to[j] = mine ? (int)e : (int)own;
    to[each + j] = mine ? __float_as_int(weight[(u64)n * each + j]) : 0;
  }
}
