// Writes FlashAttention 4's fp32 sums of gradients of keys as rows: each times `scale`, columns in their order.
//
// The library keeps the sums of a head as tiles of `tile` rows x `width` columns. Each entry (document) begins a tile
// of its own. Within a tile the sums are in an order of the library's: column c of a row lies at order[row][c].
//
//   cu_seqlens  0 5 7, tile 4    tile 0: rows 0 1 2 3    tile 1: row 4, then none    tile 2: rows 5 6, then none
//
// Rows are written in one of three forms: fp32 with OUT_FP32. Otherwise parts of further sums as MXINT15 (`rows.cuh`),
// and whole sums rounded to DTYPE. A row is a whole sum if holder_ptr is given and no other rank holds a copy of it
// (holder_ptr[row + 1] - holder_ptr[row] is at most `own`, see `return_rows.cu`).
//
// A block takes GROUP rows of one head. Neighbour lanes take neighbour rows: that is nearest to the order of tensor
// cores, where 32 bytes hold 4 columns of two rows. IN_PAIRS: columns 2 i and 2 i + 1 lie side by side in a tile and
// are loaded together.
#include "rows.cuh"

constexpr u32 GROUP = 16, BLOCK = 128;

// The row of sums at which an entry begins.
__device__ __forceinline__ u32 tiled(const int* cu_seqlens, u32 entry, u32 tile) {
  return cu_seqlens[entry] / tile * tile + entry * tile;
}

// The entry that row `row` of sums belongs to.
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
    const chunk* order, u32 chunks, void* out, u64 stride, const int* holder_ptr, u32 own) {
  const u32 first = blockIdx.x * GROUP, head = blockIdx.y;
  const u32 entry = entry_at(cu_seqlens, entries, tile, first);
  const u32 begin = cu_seqlens[entry], end = cu_seqlens[entry + 1];
  const u32 top = begin + first - tiled(cu_seqlens, entry, tile);  // the key row of sums row `first`
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
    const bool whole = holder_ptr && holder_ptr[row + 1] - holder_ptr[row] <= (int)own;
    ((chunk*)out)[at] = whole ? rounded(sum) : to_mxint15(sum);
#endif
  }
}
