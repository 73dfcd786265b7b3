// Keys and values of exactly the rows that this rank's pieces need, from all ranks of an NVLink domain.
//
// 1. Own rows that some peer reads go to this rank's slot of symmetric memory; the last block tells the peers.
// 2. A job is one source row and the expanded rows that hold it: it is read once, over NVLink or from k and v, and
//    written to all of them, by one warp. REMOTE_WARPS of a block read peers, the others own rows, at the same time:
//    more warps on the links make them slower (measured), memory wants more.
//
// A call runs as one launch, or in parts that follow each other: OWN publishes and copies own rows, EARLY and LATE pull
// the first jobs of peers and the rest. Only OWN and LATE count: a call begins with the one and ends with the other.
#include "symm.cuh"

// A row is k_width chunks of k, then v_width chunks of v.
struct Source {
  const chunk *k, *v;
  u64 k_stride, v_stride;
  u32 k_width, width;
  __device__ __forceinline__ const chunk* at(u32 row, u32 c) const {
    return c < k_width ? k + row * k_stride + c : v + row * v_stride + (c - k_width);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) pull_rows(
    const chunk* k, const chunk* v, u64 k_stride, u64 v_stride, u32 k_width, u32 width, const int* publish_rows,
    u32 publish_count, const int* job_source, const int* job_ptr, const int* job_rows, u32 jobs, const u32* remote,
    const u32* early, u32 parts, u32 local_rows, chunk* out, const u64* peers, u32* state, int rank, int world,
    u64 slot_bytes) {
  const Meeting meeting = {peers, state, rank, world};
  const Source own = {k, v, k_stride, v_stride, k_width, width};
  const u32 call = *(volatile u32*)state + 1;
  const u64 slot = HEADER + (call & 1) * slot_bytes;
  const Share every(0, WARPS), mine(REMOTE_WARPS);
  chunk* published = (chunk*)(peers[rank] + slot);

  for (u32 i = every.first; parts & OWN && i < publish_count; i += every.step) {
    const int row = publish_rows[i];
    if (row < 0) break;  // filling
    for (u32 c0 = every.lane; c0 < width; c0 += SPAN) {
      chunk held[IN_FLIGHT];
#pragma unroll
      for (int u = 0; u < IN_FLIGHT; ++u)
        if (c0 + 32 * u < width) held[u] = *own.at(row, c0 + 32 * u);
#pragma unroll
      for (int u = 0; u < IN_FLIGHT; ++u)
        if (c0 + 32 * u < width) published[(u64)row * width + c0 + 32 * u] = held[u];
    }
  }
  if (parts & OWN) publish(meeting, call);

  const u32 remote_jobs = *remote, early_jobs = *early;
  u32 begin = remote_jobs, end = parts & OWN ? jobs : remote_jobs;
  if (mine.remote) begin = parts & EARLY ? 0 : early_jobs, end = parts & LATE ? remote_jobs : early_jobs;
  u32 met = 1u << rank;  // peers known to have published
  for (u32 job = begin + mine.first; job < end; job += mine.step) {
    const int first = job_ptr[job], last = job_ptr[job + 1];
    if (first == last) continue;
    const u32 source = job_source[job], owner = source / local_rows, row = source - owner * local_rows;
    if (!(met >> owner & 1)) {
      wait_for(meeting, owner, call);
      met |= 1u << owner;
    }
    const chunk* remote = (const chunk*)(peers[owner] + slot) + (u64)row * width;
    for (u32 c0 = mine.lane; c0 < width; c0 += SPAN) {
      chunk held[IN_FLIGHT];
#pragma unroll
      for (int u = 0; u < IN_FLIGHT; ++u)
        if (c0 + 32 * u < width) held[u] = mine.remote ? load_once(remote + c0 + 32 * u) : *own.at(row, c0 + 32 * u);
      for (int j = first; j < last; ++j) {
        chunk* target = out + (u64)job_rows[j] * width;
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; ++u)
          if (c0 + 32 * u < width) target[c0 + 32 * u] = held[u];
      }
    }
  }
  if (parts & LATE) leave(meeting, call);
}
