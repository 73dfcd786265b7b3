// The symmetric memory of all ranks of one NVLink domain, and how kernels of different ranks wait for each other there:
// no host, no message.
//
// Each rank's memory begins with flags: for each kind of flag one word per rank. To signal, rank p stores the number of
// its call in its word of that flag in every peer's memory. Calls are numbered on the device (`state`), so that replays
// of a captured graph get fresh numbers.
//
// A call is several launches. Of each at most a few blocks wait for peers: many waiting blocks could keep out others,
// of this kernel or another, that a peer in turn waits for.
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

constexpr u64 HEADER = 1024;  // bytes of flags, before the rows
constexpr u32 MAX_RANKS = 32;
// Calls done; calls that the main stream has started; blocks that have come to each signal of this call.
enum Word { CALLS, STARTED, BLOCKS };
// A push has the first three, a return the last two: each has memory of its own.
//   ARRIVED     the rank's expanded rows may be overwritten      WRITTEN   its gradients of expanded rows are there
//   SENT_EARLY  the rows that peers need at once are there       LEFT      it has read all gradients of this call
//   SENT        all its rows are there
//   SENT_STAGE  and those after it: the heads of stage 0, 1, … of its rows are there, but for the last stage's (SENT)
enum Flag { ARRIVED, SENT_EARLY, SENT, SENT_STAGE, WRITTEN = 0, LEFT = 1 };

// Heads [from, to) of the `heads` of a row, which is k_width chunks of k, then those of v.
struct Columns {
  u32 k_from, k_count, v_from, count;
  __device__ __forceinline__ Columns(u32 heads, u32 from, u32 to, u32 k_width, u32 width) {
    const u32 k_head = k_width / heads, v_head = (width - k_width) / heads;
    k_from = from * k_head;
    k_count = (to - from) * k_head;
    v_from = k_width + from * v_head;
    count = k_count + (to - from) * v_head;
  }
  // Where in a row the c-th chunk of these heads is.
  __device__ __forceinline__ u32 at(u32 c) const { return c < k_count ? k_from + c : v_from + (c - k_count); }
};

struct Peers {
  const u64* addresses;  // of every rank's symmetric memory
  u32* state;            // this rank's own memory, see `Word`
  int rank, world;

  __device__ __forceinline__ u32 call() const { return *(volatile u32*)(state + CALLS) + 1; }
  __device__ __forceinline__ u32* flag(int of, Flag kind, int by) const {
    return (u32*)addresses[of] + kind * MAX_RANKS + by;
  }
  __device__ __forceinline__ chunk* rows(int of) const { return (chunk*)(addresses[of] + HEADER); }

  // After a __threadfence_system(), which orders all these stores after what is announced. Releasing stores would order
  // each of them, too, but each waits for the one before it.
  __device__ __forceinline__ void signal(Flag kind, u32 call) const {
    for (int p = 0; p < world; ++p)
      asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(flag(p, kind, rank)), "r"(call) : "memory");
  }

  // The numbers of calls wrap around: their distance is compared, with its sign.
  __device__ __forceinline__ void wait(Flag kind, int peer, u32 call) const {
    for (u32 seen;; __nanosleep(20)) {
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag(rank, kind, peer)) : "memory");
      if ((int)(seen - call) >= 0) return;
    }
  }

  // For the ranks whose bits are set.
  __device__ __forceinline__ void wait_all(Flag kind, u32 ranks, u32 call) const {
    for (int p = 0; p < world; ++p)
      if (ranks >> p & 1) wait(kind, p, call);
  }

  // Every block calls this before signal 0, 1, … of a call. True in one thread of the last block, which then sees what
  // all blocks have written.
  __device__ __forceinline__ bool last_block(u32 signal) const {
    u32* done = state + BLOCKS + signal;
    __syncthreads();
    if (threadIdx.x) return false;
    __threadfence_system();
    if (atomicAdd(done, 1) != gridDim.x - 1) return false;
    *done = 0;
    __threadfence_system();
    return true;
  }
};
