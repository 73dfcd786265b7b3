// What the kernels use of CUDA, for threads that are fibers: see `gpus.hpp`. Chunks are copied in a step each.
#pragma once
#include "gpus.hpp"

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define threadIdx (now->index)
#define blockIdx (now->warp->block->index)
#define gridDim (now->warp->block->launch->grid)

struct uint4 {
  uint32_t x, y, z, w;
  uint4() = default;
  uint4(const uint4&) = default;
  uint4& operator=(const uint4& other) {
    step();
    const size_t word = ((uintptr_t)this - (uintptr_t)symmetric.data()) / 4;
    if (now && now->warp->block->holds_back && word < symmetric.size() && below(2))
      now->held.push_back({&x, {other.x, other.y, other.z, other.w}});
    else
      x = other.x, y = other.y, z = other.z, w = other.w;
    return *this;
  }
};

inline void __syncthreads() {
  step();
  Block* block = now->warp->block;
  if (++block->waiting < block->live) return rest();
  block->waiting = 0;
  for (Warp* warp : block->warps) {
    for (Thread* thread : warp->threads) {
      if (!(warp->live & thread->bit())) continue;  // another block's by now
      block->held.insert(block->held.end(), thread->held.begin(), thread->held.end());
      thread->held.clear();
    }
    set_ready(warp, warp->live);
  }
}

enum Gather { SHUFFLE = 1, BALLOT };

// All lanes of a warp wait here for each other; the last one finds every lane's result.
inline uint64_t gather(Gather kind, uint32_t mask, uint64_t value, int from) {
  step();
  Thread* self = now;
  Warp* warp = self->warp;
  if (mask != ~0u) fail("a warp intrinsic without all lanes");
  if (warp->arrived && warp->kind != kind) fail("lanes of a warp are in different intrinsics");
  self->value = value, self->from = from, warp->kind = kind;
  if (++warp->arrived < 32) {
    rest();
    return self->result;
  }
  warp->arrived = 0;
  uint64_t ballot = 0;
  for (const Thread* each : warp->threads) ballot |= each->value ? each->bit() : 0;
  for (Thread* each : warp->threads) each->result = kind == BALLOT ? ballot : warp->threads[each->from % 32]->value;
  set_ready(warp, ~0u);
  return self->result;
}
template <class T>
inline T __shfl_sync(uint32_t mask, T value, int from) {
  return (T)gather(SHUFFLE, mask, (uint64_t)value, from);
}
inline uint32_t __ballot_sync(uint32_t mask, bool value) { return (uint32_t)gather(BALLOT, mask, value, 0); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(uint32_t x) { return __builtin_ffs((int)x); }

inline uint32_t atomicAdd(uint32_t* at, uint32_t more) {
  step();
  return __atomic_fetch_add(at, more, __ATOMIC_SEQ_CST);
}
inline void __threadfence_system() {
  step();
  carry_out(now->held);
  carry_out(now->warp->block->held);
}

inline void __nanosleep(uint32_t) {
  asleep.push_back(now);
  rest();
}
inline void store_flag(uint32_t* at, uint32_t value) {
  step();
  __atomic_store_n(at, value, __ATOMIC_SEQ_CST);
  for (Thread* thread : asleep) set_ready(thread->warp, thread->warp->ready | thread->bit());
  asleep.clear();
}
// No step between this and a __nanosleep: what is stored after the look wakes.
inline uint32_t load_flag(const uint32_t* at) {
  step();
  return __atomic_load_n(at, __ATOMIC_SEQ_CST);
}

template <class T>
inline T __ldcs(const T* at) {
  return *at;
}
template <class T>
inline void __stcs(T* at, T value) {
  *at = value;
}
