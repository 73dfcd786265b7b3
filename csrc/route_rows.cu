// Which tokens choose an expert of a rank: at[token, rank] is the token's number among those that do, in order, and -1
// for others. Rank r has experts r own … (r + 1) own - 1; choices of no rank count for nothing. A block for each rank.
//
// counts[rank]: tokens that it is sent, pairs of each of its experts, and the tokens that each rank is sent.
#include "scan.cuh"

#ifndef BLOCK
#define BLOCK 1024
#endif
#ifndef MOST
#define MOST 1024  // experts of a rank
#endif

extern "C" __global__ void __launch_bounds__(BLOCK) route_rows(
    const i64* __restrict__ chosen, int* __restrict__ at, i64* __restrict__ counts, u32 tokens, u32 each, u32 own) {
  __shared__ u32 pairs[MOST];
  const u32 rank = blockIdx.x, ranks = gridDim.x, width = 1 + own + ranks;
  const i64 low = (i64)rank * own;
  for (u32 e = threadIdx.x; e < own; e += BLOCK) pairs[e] = 0;
  __syncthreads();
  u32 sent = 0;
  for (u32 first = 0; first < tokens; first += BLOCK) {
    const u32 token = first + threadIdx.x;
    bool mine = false;
    if (token < tokens)
      for (u32 j = 0; j < each; ++j) {
        const i64 e = chosen[(u64)token * each + j] - low;
        if (e < 0 || e >= own) continue;
        mine = true;
        atomicAdd(&pairs[e], 1);
      }
    u32 all;
    const u32 before = sum_before(mine, &all);
    if (token < tokens) at[(u64)token * ranks + rank] = mine ? (int)(sent + before) : -1;
    sent += all;
  }
  __syncthreads();
  i64* row = counts + (u64)rank * width;
  if (threadIdx.x == 0) row[0] = sent;
  for (u32 e = threadIdx.x; e < own; e += BLOCK) row[1 + e] = pairs[e];
  for (u32 r = threadIdx.x; r < ranks; r += BLOCK) counts[(u64)r * width + 1 + own + rank] = sent;
}
