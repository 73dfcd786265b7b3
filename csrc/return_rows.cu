// The transpose of pull_rows: gradients of expanded rows are summed into the rows they came from, on all ranks.
//
// 1. Expanded rows that belong to peers go to this rank's slot of symmetric memory; the last block tells the peers.
// 2. Each own row sums its contributions, its own ones and those read from peers, in fp32 and in the order of its list
//    (peer << 32 | expanded row of that peer, ascending): bitwise repeatable. One warp per row.
#include "symm.cuh"

#ifndef IN_FLIGHT
#define IN_FLIGHT 4
#endif
constexpr u32 SPAN = 32 * IN_FLIGHT;

extern "C" __global__ void __launch_bounds__(128, RESIDENT) return_rows(
    const chunk* grad, u32 width, const int* publish_rows, u32 publish_count, const int* ptr, const i64* contributions,
    u32 local_rows, chunk* dk, chunk* dv, u32 k_width, const u64* peers, u32* state, int rank, int world,
    u64 slot_bytes) {
  const Meeting meeting = {peers, state, rank, world};
  const u32 call = *(volatile u32*)state + 1;
  const u64 slot = HEADER + (call & 1) * slot_bytes;
  const u32 lane = threadIdx.x % 32, warps = gridDim.x * (blockDim.x / 32);
  const u32 warp = (threadIdx.x / 32) * gridDim.x + blockIdx.x;
  chunk* mine = (chunk*)(peers[rank] + slot);

  for (u32 i = warp; i < publish_count; i += warps) {
    const u64 at = (u64)publish_rows[i] * width;
    for (u32 c0 = lane; c0 < width; c0 += SPAN) {
      chunk held[IN_FLIGHT];
#pragma unroll
      for (int u = 0; u < IN_FLIGHT; ++u)
        if (c0 + 32 * u < width) held[u] = grad[at + c0 + 32 * u];
#pragma unroll
      for (int u = 0; u < IN_FLIGHT; ++u)
        if (c0 + 32 * u < width) mine[at + c0 + 32 * u] = held[u];
    }
  }
  publish(meeting, call);

  const u32 v_width = width - k_width;
  u32 met = 1u << rank;
  for (u32 row = warp; row < local_rows; row += warps) {
    const int begin = ptr[row], end = ptr[row + 1];
    for (int j = begin; j < end; ++j) {
      const int peer = (int)(contributions[j] >> 32);
      if (!(met >> peer & 1)) {
        wait_for(meeting, peer, call);
        met |= 1u << peer;
      }
    }
    for (u32 c0 = lane; c0 < width; c0 += SPAN) {
      float sum[IN_FLIGHT][PER_CHUNK];
#pragma unroll
      for (int u = 0; u < IN_FLIGHT; ++u)
#pragma unroll
        for (int i = 0; i < PER_CHUNK; ++i) sum[u][i] = 0.f;
      for (int j = begin; j < end; ++j) {
        const i64 entry = contributions[j];
        const int peer = (int)(entry >> 32);
        const chunk* base = peer == rank ? grad : (const chunk*)(peers[peer] + slot);
        const chunk* from = base + (u64)(u32)entry * width;
        chunk held[IN_FLIGHT];
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; ++u)
          if (c0 + 32 * u < width) held[u] = load_once(from + c0 + 32 * u);
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; ++u)
          if (c0 + 32 * u < width) accumulate(held[u], sum[u]);
      }
#pragma unroll
      for (int u = 0; u < IN_FLIGHT; ++u) {
        const u32 c = c0 + 32 * u;
        if (c >= width) continue;
        if (c < k_width) dk[(u64)row * k_width + c] = rounded(sum[u]);
        else dv[(u64)row * v_width + c - k_width] = rounded(sum[u]);
      }
    }
  }
  leave(meeting, call);
}
