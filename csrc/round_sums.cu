// FlashAttention 4's fp32 sums of gradients of keys, as rows: scaled, and in the order of rows and columns.
//
// The sums of a head are tiles of `tile` x `width`; those of an entry begin at a tile of their own, and `order` tells
// where in a tile a row's columns are. With OUT_FP32 rows stay as they are. Otherwise parts of further sums become MXINT15
// (`rows.cuh`), others DTYPE: with holder_ptr the parts are rows that someone holds (`return_rows.cu`), without it all.
//
// A block takes GROUP rows of one head. Neighbour lanes take neighbour rows: that is nearest to the order of tensor
// cores, where 32 bytes hold 4 columns of two rows. IN_PAIRS: columns 2 i and 2 i + 1 lie side by side, 8 bytes of them.
#include "rows.cuh"

constexpr u32 GROUP = 16, BLOCK = 128;

// The first of an entry's rows of sums.
__device__ __forceinline__ u32 tiled(const int* cu_seqlens, u32 entry, u32 tile) {
  return cu_seqlens[entry] / tile * tile + entry * tile;
}

__device__ __forceinline__ u32 entry_at(const int* cu_seqlens, u32 entries, u32 tile, u32 row) {
  u32 low = 0;
  for (u32 high = entries; high - low > 1;) {
    const u32 middle = (low + high) / 2;
    (tiled(cu_seqlens, middle, tile) <= row ? low : high) = middle;
  }
  return low;
}

extern "C" __global__ void __launch_bounds__(BLOCK) round_sums(
    const float* sums, u64 per_head, float scale, const int* cu_seqlens, u32 entries, u32 tile, u32 width,
    const chunk* order, u32 chunks, void* out, u64 stride, const int* holder_ptr) {
  const u32 first = blockIdx.x * GROUP, head = blockIdx.y;
  const u32 entry = entry_at(cu_seqlens, entries, tile, first);
  const u32 begin = cu_seqlens[entry], end = cu_seqlens[entry + 1];
  const u32 top = begin + first - tiled(cu_seqlens, entry, tile);  // the row that the first one becomes
  if (top >= end) return;
  const u32 in_tile = first % tile;
  const float* from = sums + head * per_head + (u64)(first - in_tile) * width;
  for (u32 i = threadIdx.x; i < GROUP * chunks; i += BLOCK) {
    const u32 row = top + i % GROUP, c = i / GROUP;
    if (row >= end) continue;
    lanes place;
    place.bits = order[(in_tile + i % GROUP) * chunks + c];
    float sum[PER_CHUNK];
#if defined(IN_PAIRS)
#pragma unroll
    for (int k = 0; k < PER_CHUNK; k += 2) {
      const float2 pair = *(const float2*)(from + place.at[k]);
      sum[k] = scale * pair.x, sum[k + 1] = scale * pair.y;
    }
#else
#pragma unroll
    for (int k = 0; k < PER_CHUNK; ++k) sum[k] = scale * from[place.at[k]];
#endif
    const u64 at = row * stride + head * chunks + c;
#if defined(OUT_FP32)
    ((float4*)out)[2 * at] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    ((float4*)out)[2 * at + 1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
#else
    const bool whole = holder_ptr && holder_ptr[row] == holder_ptr[row + 1];
    ((chunk*)out)[at] = whole ? rounded(sum) : to_mxint15(sum);
#endif
  }
}
