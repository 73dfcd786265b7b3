// Blocks of a kernel, one after the other; the threads of a block are fibers that wait for each other where the kernel
// says so. For kernels whose blocks wait for no other.
#pragma once
#include <ucontext.h>

#include <cstdlib>
#include <functional>
#include <tuple>
#include <utility>
#include <vector>

#include "scalars.hpp"

#define __shared__ static

struct Index {
  uint32_t x;
};
struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 17);
  Index index;
  bool done;
};
inline std::vector<Fiber> fibers(1024);
inline ucontext_t scheduler;
inline Fiber* current;
inline Index blockIdx;
inline uint32_t arrived, phase, live;
struct Warp {
  uint32_t arrived, phase, value[2][32];
};
inline Warp warps[32];
inline std::function<void()> body;
#define threadIdx (current->index)

inline void rest() { swapcontext(&current->context, &scheduler); }

inline void __syncthreads() {
  const uint32_t mine = phase;
  if (++arrived == live) arrived = 0, ++phase;
  while (phase == mine) rest();
}

// Two sets of values: who is ahead writes the one that nobody reads any more.
inline float __shfl_xor_sync(uint32_t mask, float x, uint32_t bit) {
  if (mask != ~0u) abort();
  Warp& warp = warps[threadIdx.x / 32];
  const uint32_t mine = warp.phase, lane = threadIdx.x % 32;
  warp.value[mine % 2][lane] = __float_as_uint(x);
  if (++warp.arrived == 32) warp.arrived = 0, ++warp.phase;
  while (warp.phase == mine) rest();
  return __uint_as_float(warp.value[mine % 2][lane ^ bit]);
}

inline void __syncwarp() { __shfl_xor_sync(~0u, 0, 0); }
inline float atomicAdd(float* at, float more) {
  const float before = *at;
  *at += more;
  return before;
}

inline void run_fiber() {
  body();
  current->done = true;
  --live;
  if (live && arrived == live) arrived = 0, ++phase;
  rest();
}

inline void run_block(uint32_t threads) {
  arrived = 0, live = threads;
  memset(warps, 0, sizeof warps);
  for (uint32_t i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.index.x = i, fiber.done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_fiber, 0);
  }
  while (live) {
    for (uint32_t i = 0; i < threads; ++i)
      if (!fibers[i].done) current = &fibers[i], swapcontext(&scheduler, &current->context);
  }
}

template <class... Args, size_t... I>
void launch(void (*kernel)(Args...), uint32_t grid, uint32_t block, const uint64_t* values, std::index_sequence<I...>) {
  std::tuple<Args...> args;
  (memcpy(&std::get<I>(args), values + I, sizeof(Args)), ...);
  body = [&] { std::apply(kernel, args); };
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) run_block(block);
}

// values: of the kernel's arguments, 8 bytes each.
template <class... Args>
void launch(void (*kernel)(Args...), uint32_t grid, uint32_t block, const uint64_t* values) {
  launch(kernel, grid, block, values, std::index_sequence_for<Args...>());
}
