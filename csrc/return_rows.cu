// The transpose of push_rows: each rank sums the gradients of its rows over all the expanded rows, in symmetric memory,
// that hold a copy. A row's list (rank << 32 | expanded row, ascending) is summed in fp32 and in that order: bitwise
// repeatable. A warp takes a row. REMOTE_WARPS warps of a block take the rows that peers contribute to, the other warps
// the rest: more warps on the links make these slower (measured), local memory wants more.
//
// Local rows [source, source + count) were read in place: dk and dv hold their gradient already, and it is added first.
// What is summed is of DTYPE, or MXINT15 (`rows.cuh`); the results are of DTYPE.
//
// One launch sums the gradients of heads [from, to) of `heads`.
//
// All ranks have written their gradients when this starts: a `signal_wait.cu` before has waited for that.
#include "peers.cuh"

constexpr u32 BATCH = 8;  // rows whose lists a warp looks at together

// Which rows a warp takes: batches first, first + step, …. Warps [0, REMOTE_WARPS) of a block are `remote`.
struct Share {
  u32 first, step, lane;
  bool remote;
  __device__ __forceinline__ Share() {
    const u32 warp = threadIdx.x / 32;
    lane = threadIdx.x % 32;
    remote = warp < REMOTE_WARPS;
    first = (remote ? warp : warp - REMOTE_WARPS) * gridDim.x + blockIdx.x;
    step = (remote ? REMOTE_WARPS : WARPS - REMOTE_WARPS) * gridDim.x;
  }
};

struct Gradients {
  chunk *dk, *dv;
  u32 width, k_width, source, count;
  __device__ __forceinline__ bool in_place(u32 row) const { return row - source < count; }
  __device__ __forceinline__ chunk* at(u32 row, u32 c) const {
    return c < k_width ? dk + (u64)row * k_width + c : dv + (u64)row * (width - k_width) + c - k_width;
  }
};

__device__ __forceinline__ void sum_row(
    const Peers& peers, const Gradients& grads, const Columns& part, const i64* holders, int begin, int end, u32 row,
    u32 lane) {
  const u32 width = grads.width;
  for (u32 c0 = lane; c0 < part.count; c0 += SPAN) {
    float sum[IN_FLIGHT][PER_CHUNK];
#pragma unroll
    for (int u = 0; u < IN_FLIGHT; ++u)
#pragma unroll
      for (int i = 0; i < PER_CHUNK; ++i) sum[u][i] = 0.f;
    if (grads.in_place(row)) {
#pragma unroll
      for (int u = 0; u < IN_FLIGHT; ++u)
        if (c0 + 32 * u < part.count) accumulate_part(*grads.at(row, part.at(c0 + 32 * u)), sum[u]);
    }
    for (int j = begin; j < end; ++j) {
      const i64 holder = holders[j];
      const chunk* from = peers.rows((int)(holder >> 32)) + (u64)(u32)holder * width;
      chunk held[IN_FLIGHT];
#pragma unroll
      for (int u = 0; u < IN_FLIGHT; ++u)
        if (c0 + 32 * u < part.count) held[u] = load_once(from + part.at(c0 + 32 * u));
#pragma unroll
      for (int u = 0; u < IN_FLIGHT; ++u)
        if (c0 + 32 * u < part.count) accumulate_part(held[u], sum[u]);
    }
#pragma unroll
    for (int u = 0; u < IN_FLIGHT; ++u) {
      const u32 c = c0 + 32 * u;
      if (c < part.count) *grads.at(row, part.at(c)) = rounded(sum[u]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) return_rows(
    const int* ptr, const i64* holders, u32 rows, chunk* dk, chunk* dv, u32 k_width, u32 width, u32 source,
    u32 count, u32 heads, u32 from, u32 to, const u64* addresses, u32* state, int rank, int world) {
  const Peers peers = {addresses, state, rank, world};
  const u32 call = peers.call();
  const Gradients grads = {dk, dv, width, k_width, source, count};
  const Columns columns(heads, from, to, k_width, width);
  const Share mine;
  for (u32 batch = mine.first; batch * BATCH < rows; batch += mine.step) {
    const u32 candidate = batch * BATCH + mine.lane;
    int begin = 0, end = 0;
    bool remote = false;
    bool there = mine.lane < BATCH && candidate < rows;
    if (there) {
      begin = ptr[candidate];
      end = ptr[candidate + 1];
      for (int j = begin; j < end; ++j) remote |= (int)(holders[j] >> 32) != rank;
      there = begin < end || !grads.in_place(candidate);
    }
    u32 todo = __ballot_sync(0xffffffffu, there && remote == mine.remote);
    for (; todo; todo &= todo - 1) {
      const int at = __ffs(todo) - 1;
      const int start = __shfl_sync(0xffffffffu, begin, at), stop = __shfl_sync(0xffffffffu, end, at);
      sum_row(peers, grads, columns, holders, start, stop, batch * BATCH + at, mine.lane);
    }
  }
  if (peers.last_block(0)) {
    peers.signal(LEFT, call);
    state[CALLS] = call;
  }
}
