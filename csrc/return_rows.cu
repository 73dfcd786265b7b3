// The transpose of pull_rows: gradients of expanded rows are summed into the rows they came from, on all ranks.
//
// 1. Expanded rows that belong to peers go to this rank's slot of symmetric memory; the last block tells the peers.
// 2. Each own row sums its contributions, its own ones and those read from peers, in fp32 and in the order of its list
//    (peer << 32 | expanded row of that peer, ascending): bitwise repeatable. One warp per row; REMOTE_WARPS of a
//    block take the rows with contributions from peers, the others the rest.
//
// Two launches: OWN does the first, LATE the second.
#include "symm.cuh"

constexpr u32 BATCH = 8;  // rows whose lists a warp looks at together

struct Gradients {
  const chunk* own;
  chunk *dk, *dv;
  u32 width, k_width;
};

__device__ __forceinline__ void sum_row(
    const Meeting& meeting, const Gradients& grads, const i64* contributions, int begin, int end, u32 row, u64 slot,
    u32 lane) {
  const u32 width = grads.width, v_width = width - grads.k_width;
  for (u32 c0 = lane; c0 < width; c0 += SPAN) {
    float sum[IN_FLIGHT][PER_CHUNK];
#pragma unroll
    for (int u = 0; u < IN_FLIGHT; ++u)
#pragma unroll
      for (int i = 0; i < PER_CHUNK; ++i) sum[u][i] = 0.f;
    for (int j = begin; j < end; ++j) {
      const i64 entry = contributions[j];
      const int peer = (int)(entry >> 32);
      const chunk* base = peer == meeting.rank ? grads.own : (const chunk*)(meeting.peers[peer] + slot);
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
      if (c < grads.k_width) grads.dk[(u64)row * grads.k_width + c] = rounded(sum[u]);
      else grads.dv[(u64)row * v_width + c - grads.k_width] = rounded(sum[u]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) return_rows(
    const chunk* grad, u32 width, const int* publish_rows, u32 publish_count, const int* ptr, const i64* contributions,
    u32 local_rows, chunk* dk, chunk* dv, u32 k_width, u32 parts, const u64* peers, u32* state, int rank, int world,
    u64 slot_bytes) {
  const Meeting meeting = {peers, state, rank, world};
  const Gradients grads = {grad, dk, dv, width, k_width};
  const u32 call = *(volatile u32*)state + 1;
  const u64 slot = HEADER + (call & 1) * slot_bytes;
  const Share every(0, WARPS), mine(REMOTE_WARPS);
  chunk* published = (chunk*)(peers[rank] + slot);

  for (u32 i = every.first; parts & OWN && i < publish_count; i += every.step) {
    const int row = publish_rows[i];
    if (row < 0) break;  // filling
    const u64 at = (u64)row * width;
    for (u32 c0 = every.lane; c0 < width; c0 += SPAN) {
      chunk held[IN_FLIGHT];
#pragma unroll
      for (int u = 0; u < IN_FLIGHT; ++u)
        if (c0 + 32 * u < width) held[u] = grad[at + c0 + 32 * u];
#pragma unroll
      for (int u = 0; u < IN_FLIGHT; ++u)
        if (c0 + 32 * u < width) published[at + c0 + 32 * u] = held[u];
    }
  }
  if (parts & OWN) publish(meeting, call);
  if (!(parts & LATE)) return;

  u32 met = 1u << rank;
  for (u32 batch = mine.first; batch * BATCH < local_rows; batch += mine.step) {
    const u32 candidate = batch * BATCH + mine.lane;
    int begin = 0, end = 0;
    u32 peers_of = 0;
    if (mine.lane < BATCH && candidate < local_rows) {
      begin = ptr[candidate];
      end = ptr[candidate + 1];
      for (int j = begin; j < end; ++j) peers_of |= 1u << (int)(contributions[j] >> 32);
    }
    const bool remote = peers_of & ~(1u << rank);
    u32 todo = __ballot_sync(0xffffffffu, mine.lane < BATCH && candidate < local_rows && remote == mine.remote);
    for (; todo; todo &= todo - 1) {
      const int at = __ffs(todo) - 1;
      u32 missing = __shfl_sync(0xffffffffu, peers_of, at) & ~met;
      for (; missing; missing &= missing - 1) {
        wait_for(meeting, __ffs(missing) - 1, call);
        met |= missing & -missing;
      }
      const int from = __shfl_sync(0xffffffffu, begin, at), to = __shfl_sync(0xffffffffu, end, at);
      sum_row(meeting, grads, contributions, from, to, batch * BATCH + at, slot, mine.lane);
    }
  }
  leave(meeting, call);
}
