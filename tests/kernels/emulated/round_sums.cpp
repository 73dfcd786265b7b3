// A kernel that waits for no other, one thread after the other: see `test_round_sums.py`.
#include "scalars.hpp"

struct float2 {
  float x, y;
};
struct Index {
  uint32_t x, y;
};
static Index threadIdx, blockIdx;

static int __float2int_rn(float x) { return (int)std::nearbyint(x); }

#include "round_sums.cu"

extern "C" void round_all(
    u32 groups, u32 heads, const float* sums, u64 per_head, float scale, const int* cu_seqlens, u32 entries, u32 tile,
    u32 width, const void* order, u32 chunks, void* out, u64 stride, const int* holder_ptr, u32 own) {
  for (blockIdx.y = 0; blockIdx.y < heads; ++blockIdx.y)
    for (blockIdx.x = 0; blockIdx.x < groups; ++blockIdx.x)
      for (threadIdx.x = 0; threadIdx.x < BLOCK; ++threadIdx.x)
        round_sums(
            sums, per_head, scale, cu_seqlens, entries, tile, width, (const chunk*)order, chunks, (chunk*)out, stride,
            holder_ptr, own);
}

extern "C" void add_parts(u32 chunks, const chunk* parts, float* sums) {
  for (u32 i = 0; i < chunks; ++i) accumulate_part(parts[i], sums + 8 * i);
}

extern "C" void there_and_back(u32 chunks, const float* x, float* sums) {
  for (u32 i = 0; i < chunks; ++i) accumulate_part(to_mxint15(x + 8 * i), sums + 8 * i);
}
