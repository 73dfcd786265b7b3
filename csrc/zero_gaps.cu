// Overwrites the rows of entries that have no key: exact zeros in out, and -inf in lse (heads, rows) if it is given. So
// what a kernel wrote there does not matter. A column of blocks takes an entry; one with keys costs one comparison.
#include "rows.cuh"

extern "C" __global__ void __launch_bounds__(256) zero_gaps(
    chunk* __restrict__ out, float* __restrict__ lse, const int* __restrict__ cu_q, const int* __restrict__ cu_k,
    u32 entries, u32 width, u32 heads, u32 rows) {
  for (u32 entry = blockIdx.x; entry < entries; entry += gridDim.x) {
    if (cu_k[entry] != cu_k[entry + 1]) continue;
    const u32 begin = cu_q[entry], count = cu_q[entry + 1] - begin;
    const u64 total = (u64)count * width, step = (u64)gridDim.y * 256;
    for (u64 at = (u64)blockIdx.y * 256 + threadIdx.x; at < total; at += step)
      out[(u64)begin * width + at] = chunk{};
    if (lse == nullptr) continue;
    for (u64 at = (u64)blockIdx.y * 256 + threadIdx.x; at < (u64)count * heads; at += step)
      lse[at / count * rows + begin + at % count] = __int_as_float(0xff800000);
  }
}
