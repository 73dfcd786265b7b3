// Choices of rows, in their order, sorted by expert: of each pair its row and weight, and of each choice its pair, -1
// where it is of no expert. came: (rows, 2 each) numbers of experts, and the weights' bits; ends: of each expert's
// pairs. A block for each expert.
#include "scan.cuh"

#ifndef BLOCK
#define BLOCK 1024
#endif
#ifndef ITEMS
#define ITEMS 4
#endif

extern "C" __global__ void __launch_bounds__(BLOCK) sort_choices(
    const int* __restrict__ came, const int* __restrict__ ends, int* __restrict__ row, float* __restrict__ weight,
    int* __restrict__ at, u32 rows, u32 each) {
  const int expert = blockIdx.x, own = gridDim.x;
  const u32 choices = rows * each;
  u32 done = expert ? ends[expert - 1] : 0;
  for (u32 first = 0; first < choices; first += BLOCK * ITEMS) {
    const u32 begin = first + threadIdx.x * ITEMS;
    u32 mine = 0;
    int ids[ITEMS];
#pragma unroll
    for (int t = 0; t < ITEMS; ++t) {
      const u32 i = begin + t;
      ids[t] = i < choices ? came[(u64)(i / each) * 2 * each + i % each] : own;
      mine += ids[t] == expert;
      if (i < choices && expert == 0 && ids[t] >= own) at[i] = -1;
    }
    u32 all;
    u32 place = done + sum_before(mine, &all);
#pragma unroll
    for (int t = 0; t < ITEMS; ++t) {
      if (ids[t] != expert) continue;
      const u32 i = begin + t, r = i / each;
      row[place] = (int)r;
      weight[place] = __int_as_float(came[(u64)r * 2 * each + each + i % each]);
      at[i] = (int)place++;
    }
    done += all;
  }
}
