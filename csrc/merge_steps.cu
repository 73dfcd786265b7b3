// Attention over several disjoint sets of keys from the fp32 results over each ("step"): the weight of step s is
// exp(lse_s - lse), with lse = log sum exp(lse_s). A step that saw no key (lse -inf, or +inf as FlashAttention 2 writes
// it) has weight 0 and its output is not read; a row that saw no key in any step becomes exact zeros and -inf.
//
// outs (S, R, H, D), lses (S, H, R) -> out (R, H, D), lse (H, R). width: chunks of one head of a row.
#include "rows.cuh"

__device__ __forceinline__ float seen(float lse) {
  return lse == __int_as_float(0x7f800000) ? __int_as_float(0xff800000) : lse;
}

extern "C" __global__ void __launch_bounds__(256) merge_steps(
    const chunk* __restrict__ outs, const float* __restrict__ lses, chunk* __restrict__ out, float* __restrict__ lse,
    u32 steps, u32 rows, u32 heads, u32 width) {
  const float none = __int_as_float(0xff800000);
  const u64 total = (u64)rows * heads * width;
  for (u64 at = (u64)blockIdx.x * 256 + threadIdx.x; at < total; at += (u64)gridDim.x * 256) {
    const u32 pair = total >> 32 ? (u32)(at / width) : (u32)at / width;
    const u32 row = pair / heads, head = pair - row * heads;
    const u64 where = (u64)head * rows + row, pitch = (u64)heads * rows;
    float top = none;
    for (u32 s = 0; s < steps; ++s) top = fmaxf(top, seen(lses[s * pitch + where]));
    float mass = 0.f, sum[PER_CHUNK];
#pragma unroll
    for (int i = 0; i < PER_CHUNK; ++i) sum[i] = 0.f;
    for (u32 s = 0; s < steps; ++s) {
      const float one = seen(lses[s * pitch + where]);
      if (one == none) continue;
      const float weight = expf(one - top);
      mass += weight;
      lanes x;
      x.bits = outs[s * total + at];
#pragma unroll
      for (int i = 0; i < PER_CHUNK; ++i) sum[i] = fmaf(weight, widen(x.at[i]), sum[i]);
    }
    const float scale = top == none ? 0.f : 1.f / mass;
#pragma unroll
    for (int i = 0; i < PER_CHUNK; ++i) sum[i] *= scale;
    out[at] = rounded(sum);
    if (at - (u64)pair * width == 0) lse[where] = top == none ? none : top + logf(mass);
  }
}
