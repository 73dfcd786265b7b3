// Keys and values of exactly the rows that this rank's pieces need, from all ranks of an NVLink domain.
//
// 1. Own rows that some peer reads go to this rank's slot of symmetric memory; the last block tells the peers.
// 2. A job is one source row and the expanded rows that hold it: it is read once, over NVLink or from k and v, and
//    written to all of them. From Hopper on the bulk copy engine moves them; before, one warp per job does.
#include "symm.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define BULK
#include "bulk.cuh"
#endif

#ifndef IN_FLIGHT
#define IN_FLIGHT 4
#endif
constexpr u32 STEP = 32 * IN_FLIGHT;

// A row is k_width chunks of k, then v_width chunks of v.
struct Source {
  const chunk *k, *v;
  u64 k_stride, v_stride;
  u32 k_width, width;
  __device__ __forceinline__ const chunk* at(u32 row, u32 c) const {
    return c < k_width ? k + row * k_stride + c : v + row * v_stride + (c - k_width);
  }
};

struct Jobs {
  const int *source, *ptr, *rows;
  u32 count, local_rows;
};

__device__ __forceinline__ void copy_out(
    const Source& own, const int* publish_rows, u32 count, chunk* slot, u32 warp, u32 warps, u32 lane) {
  for (u32 i = warp; i < count; i += warps) {
    const u32 row = publish_rows[i];
    for (u32 c0 = lane; c0 < own.width; c0 += STEP) {
      chunk held[IN_FLIGHT];
#pragma unroll
      for (int u = 0; u < IN_FLIGHT; ++u)
        if (c0 + 32 * u < own.width) held[u] = *own.at(row, c0 + 32 * u);
#pragma unroll
      for (int u = 0; u < IN_FLIGHT; ++u)
        if (c0 + 32 * u < own.width) slot[(u64)row * own.width + c0 + 32 * u] = held[u];
    }
  }
}

#ifdef BULK
// Part of a job that fits one stage of the ring: chunks [c0, c0 + count) of the row.
__device__ __forceinline__ void bulk_jobs(
    Ring& ring, const Meeting& meeting, const Source& own, const Jobs& jobs, u64 slot, u32 call, chunk* out, u32 warp,
    u32 warps) {
  constexpr u32 LIMIT = SPAN / sizeof(chunk);
  const u32 parts = (own.width + LIMIT - 1) / LIMIT, units = jobs.count * parts;
  const u32 mine = units > warp ? (units - warp + warps - 1) / warps : 0;
  u32 met = 1u << meeting.rank;
  u32 upcoming = mine ? jobs.source[warp / parts] : 0;
  move_units(
      ring, mine,
      [&](u32 n, int stage) {
        const u32 unit = warp + n * warps, c0 = unit % parts * LIMIT, count = min(LIMIT, own.width - c0);
        const u32 owner = upcoming / jobs.local_rows, row = upcoming - owner * jobs.local_rows;
        if (n + 1 < mine) upcoming = jobs.source[(unit + warps) / parts];
        expect(ring, stage, count * sizeof(chunk));
        if (owner != (u32)meeting.rank) {
          if (!(met >> owner & 1)) {
            wait_for(meeting, owner, call);
            before_bulk();
            met |= 1u << owner;
          }
          const chunk* remote = (const chunk*)(meeting.peers[owner] + slot) + (u64)row * own.width;
          load(ring, stage, 0, remote + c0, count * sizeof(chunk));
          return;
        }
        const u32 of_k = c0 < own.k_width ? min(count, own.k_width - c0) : 0;
        if (of_k) load(ring, stage, 0, own.at(row, c0), of_k * sizeof(chunk));
        if (of_k < count) load(ring, stage, of_k * sizeof(chunk), own.at(row, c0 + of_k), (count - of_k) * sizeof(chunk));
      },
      [&](u32 n, int stage) {
        const u32 unit = warp + n * warps, job = unit / parts, c0 = unit % parts * LIMIT;
        const u32 bytes = min(LIMIT, own.width - c0) * sizeof(chunk);
        for (int j = jobs.ptr[job]; j < jobs.ptr[job + 1]; ++j)
          store(ring, stage, out + (u64)jobs.rows[j] * own.width + c0, bytes);
      });
}
#endif

__device__ __forceinline__ void warp_jobs(
    const Meeting& meeting, const Source& own, const Jobs& jobs, u64 slot, u32 call, chunk* out, u32 warp, u32 warps,
    u32 lane) {
  u32 met = 1u << meeting.rank;  // peers known to have published
  for (u32 job = warp; job < jobs.count; job += warps) {
    const int begin = jobs.ptr[job], end = jobs.ptr[job + 1];
    const u32 source = jobs.source[job], owner = source / jobs.local_rows, row = source - owner * jobs.local_rows;
    if (begin == end) continue;
    if (!(met >> owner & 1)) {
      wait_for(meeting, owner, call);
      met |= 1u << owner;
    }
    const chunk* remote = (const chunk*)(meeting.peers[owner] + slot) + (u64)row * own.width;
    for (u32 c0 = lane; c0 < own.width; c0 += STEP) {
      chunk held[IN_FLIGHT];
#pragma unroll
      for (int u = 0; u < IN_FLIGHT; ++u)
        if (c0 + 32 * u < own.width)
          held[u] = owner == meeting.rank ? *own.at(row, c0 + 32 * u) : load_once(remote + c0 + 32 * u);
      for (int j = begin; j < end; ++j) {
        chunk* target = out + (u64)jobs.rows[j] * own.width;
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; ++u)
          if (c0 + 32 * u < own.width) target[c0 + 32 * u] = held[u];
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(128, RESIDENT) pull_rows(
    const chunk* k, const chunk* v, u64 k_stride, u64 v_stride, u32 k_width, u32 width, const int* publish_rows,
    u32 publish_count, const int* job_source, const int* job_ptr, const int* job_rows, u32 job_count, u32 local_rows,
    chunk* out, const u64* peers, u32* state, int rank, int world, u64 slot_bytes) {
  const Meeting meeting = {peers, state, rank, world};
  const Source own = {k, v, k_stride, v_stride, k_width, width};
  const Jobs jobs = {job_source, job_ptr, job_rows, job_count, local_rows};
  const u32 call = *(volatile u32*)state + 1;
  const u64 slot = HEADER + (call & 1) * slot_bytes;
  const u32 lane = threadIdx.x % 32, warps = gridDim.x * (blockDim.x / 32);
  const u32 warp = (threadIdx.x / 32) * gridDim.x + blockIdx.x;
  copy_out(own, publish_rows, publish_count, (chunk*)(peers[rank] + slot), warp, warps, lane);
  publish(meeting, call);
#ifdef BULK
  __shared__ Ring rings[BULK_WARPS];
  Ring& ring = rings[threadIdx.x / 32];
  if (lane == 0) {
    ring_init(ring);
    bulk_jobs(ring, meeting, own, jobs, slot, call, out, warp, warps);
  }
#else
  warp_jobs(meeting, own, jobs, slot, call, out, warp, warps, lane);
#endif
  leave(meeting, call);
}
