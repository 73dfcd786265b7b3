// Meetings of the ranks of one NVLink domain, from inside kernels: no host, no message.
//
// At the start of its symmetric memory each rank has words for flags, one per kind of flag and rank: rank p writes the
// number of its call into word p of every peer. Calls are numbered on the device (`state`), so a captured graph
// replays with fresh numbers. A call is several launches; of each a few blocks wait, at most: many could keep out
// others, of this or of another kernel, that a peer is waiting for.
#pragma once
#include "rows.cuh"

#ifndef WARPS
#define WARPS 16
#endif
#ifndef REMOTE_WARPS
#define REMOTE_WARPS 4
#endif
#ifndef IN_FLIGHT
#define IN_FLIGHT 4
#endif
constexpr int THREADS = 32 * WARPS;
constexpr u32 SPAN = 32 * IN_FLIGHT;  // chunks that a warp moves in one go

constexpr u64 HEADER = 1024;  // flags, before the rows
constexpr u32 MAX_RANKS = 32;
// Calls done; blocks done with part 1 or 2 of this one; calls that the main stream has seen begin.
enum Word { CALLS, PART, SEEN = 3 };
enum Flag { ARRIVED, SENT_EARLY, SENT, WRITTEN = 0, LEFT = 1 };

struct Meeting {
  const u64* peers;  // base address of every rank's symmetric memory
  u32* state;        // this rank's own memory, see `Word`
  int rank, world;

  __device__ __forceinline__ u32 call() const { return *(volatile u32*)(state + CALLS) + 1; }
  __device__ __forceinline__ u32* flag(int of, Flag kind, int by) const {
    return (u32*)peers[of] + kind * MAX_RANKS + by;
  }
  __device__ __forceinline__ chunk* rows(int of) const { return (chunk*)(peers[of] + HEADER); }

  // After a __threadfence_system(): one for all of them, since a releasing store waits for the one before it.
  __device__ __forceinline__ void tell(Flag kind, u32 call) const {
    for (int p = 0; p < world; ++p)
      asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(flag(p, kind, rank)), "r"(call) : "memory");
  }

  // Call numbers wrap: compare as a signed distance.
  __device__ __forceinline__ void wait(Flag kind, int peer, u32 call) const {
    for (u32 seen;; __nanosleep(20)) {
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag(rank, kind, peer)) : "memory");
      if ((int)(seen - call) >= 0) return;
    }
  }

  __device__ __forceinline__ void wait_all(Flag kind, u32 ranks, u32 call) const {
    for (int p = 0; p < world; ++p)
      if (ranks >> p & 1) wait(kind, p, call);
  }

  // Every block calls this at the end of part 1 or 2; true in one thread of the last one, after everything.
  __device__ __forceinline__ bool last_block(int part) const {
    u32* done = state + PART + part - 1;
    __syncthreads();
    if (threadIdx.x) return false;
    __threadfence_system();
    if (atomicAdd(done, 1) != gridDim.x - 1) return false;
    *done = 0;
    __threadfence_system();
    return true;
  }
};
