// A meeting of the ranks of one NVLink domain, from inside a kernel: no host, no launch in between.
//
// Each rank owns `flags` (P words in symmetric memory); rank p writes its call number into flags[p] of every peer.
// Calls are numbered on the device (`state[0]`), so a captured graph replays with fresh numbers. Data slots alternate
// with the call number: a rank that has finished call n + 1 knows that every peer has finished reading call n.
#pragma once
#include "rows.cuh"

// One block per multiprocessor: all blocks of a launch must run at once, or one that waits for a peer could keep out one
// that has yet to publish.
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

// Which of a kind of work a warp does: items first, first + step, …. Warps [0, split) of a block are `remote`.
struct Share {
  u32 first, step, lane;
  bool remote;
  __device__ __forceinline__ explicit Share(u32 split, u32 all = WARPS) {
    const u32 warp = threadIdx.x / 32;
    lane = threadIdx.x % 32;
    remote = warp < split;
    first = (remote ? warp : warp - split) * gridDim.x + blockIdx.x;
    step = (remote ? split : all - split) * gridDim.x;
  }
};

// Parts of a call, where it runs as several launches. A launch that publishes and waits at once can lock up beside
// other kernels that wait for peers, if not all of its blocks fit.
constexpr u32 OWN = 1, EARLY = 2, LATE = 4;

struct Meeting {
  const u64* peers;  // base address of every rank's symmetric memory
  u32* state;        // this rank's own memory: calls done, blocks published, blocks left
  int rank, world;
};

constexpr u64 HEADER = 1024;  // flags at the start of the symmetric memory

__device__ __forceinline__ void store_release(u32* p, u32 x) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}

__device__ __forceinline__ u32 load_acquire(const u32* p) {
  u32 x;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}

// Call numbers wrap: compare as a signed distance.
__device__ __forceinline__ void wait_for(const Meeting& m, int peer, u32 call) {
  const u32* flag = (const u32*)m.peers[m.rank] + peer;
  while ((int)(load_acquire(flag) - call) < 0) __nanosleep(20);
}

// Every block calls this after its last store of published data: the last one tells the peers.
__device__ __forceinline__ void publish(const Meeting& m, u32 call) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(m.state + 1, 1) == gridDim.x - 1) {
      m.state[1] = 0;
      __threadfence_system();
      for (int p = 0; p < m.world; ++p) store_release((u32*)m.peers[p] + m.rank, call);
    }
  }
}

// Every block calls this at its end. The last one waits until all peers have begun this call, which ends their reading
// of the call before it, and only then counts the call as done.
__device__ __forceinline__ void leave(const Meeting& m, u32 call) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(m.state + 2, 1) == gridDim.x - 1) {
      for (int p = 0; p < m.world; ++p) wait_for(m, p, call);
      m.state[2] = 0;
      m.state[0] = call;
    }
  }
}
