// The transpose of push_rows: each rank sums the gradients of its rows over all the expanded rows, in symmetric memory,
// that hold a copy. A row's list (rank << 32 | expanded row, ascending) is summed in fp32 and in that order: bitwise
// repeatable. A warp takes a row. REMOTE_WARPS warps of a block take the rows that peers contribute to, the other warps
// the rest: more warps on the links make these slower (measured), local memory wants more.
//
// Local rows [source, source + count) were read in place: dk and dv hold their gradient already. Where their lists hold
// this rank's own copy, which is row `listed` of `rank << 32 | expanded row` for the first of them, it is read instead;
// where lists don't (listed < 0), it is added first.
//
// Of the first `slots` of these rows the first gradient that a peer holds may be pulled, while a kernel still works on dk
// and dv, by a launch with `pull`: to row `slot` and on of this rank's symmetric memory, where nothing else is. The
// launch that sums them up then reads it there. slots = 0: nothing was pulled.
//
// What is summed is of DTYPE, or MXINT15 (`rows.cuh`); the results are of DTYPE.
//
// One launch sums the gradients of heads [from, to) of `heads`.
//
// All ranks have written their gradients when this starts: a `signal_wait.cu` before has waited for that.
#include "peers.cuh"

// Which rows a warp takes: first, first + step, …: rows side by side go to different warps. Warps [0, REMOTE_WARPS) of a
// block are `remote`.
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

// A row of gradients, which may lie in two places: its chunks of k, then those of v.
struct Row {
  chunk *k, *v;
  u32 k_width;
  __device__ __forceinline__ chunk* at(u32 c) const { return c < k_width ? k + c : v + (c - k_width); }
};

struct Gradients {
  chunk *dk, *dv;
  u32 width, k_width, source, count;
  i64 listed;
  u32 slot, slots;
  __device__ __forceinline__ bool in_place(u32 row) const { return row - source < count; }
  // The entry of a row's list in the place of which dk and dv are read; -1: none.
  __device__ __forceinline__ i64 instead(u32 row) const {
    return listed >= 0 && in_place(row) ? listed + (row - source) : -1;
  }
  __device__ __forceinline__ bool has_slot(u32 row) const { return in_place(row) && row - source < slots; }
  // Where what is pulled for a row is.
  __device__ __forceinline__ i64 pulled(u32 row, int rank) const { return (i64)rank << 32 | (slot + row - source); }
  __device__ __forceinline__ Row own(u32 row) const {
    return {dk + (u64)row * k_width, dv + (u64)row * (width - k_width), k_width};
  }
  __device__ __forceinline__ Row held(const Peers& peers, i64 holder) const {
    chunk* from = peers.rows((int)(holder >> 32)) + (u64)(u32)holder * width;
    return {from, from + k_width, k_width};
  }
};

__device__ __forceinline__ void load(const Row& row, const Columns& part, u32 c0, chunk* held) {
#pragma unroll
  for (int u = 0; u < IN_FLIGHT; ++u)
    if (c0 + 32 * u < part.count) held[u] = load_once(row.at(part.at(c0 + 32 * u)));
}

__device__ __forceinline__ void add(const chunk* held, u32 c0, u32 count, float (*sum)[PER_CHUNK]) {
#pragma unroll
  for (int u = 0; u < IN_FLIGHT; ++u)
    if (c0 + 32 * u < count) accumulate_part(held[u], sum[u]);
}

// The first entry that is a peer's; `end`: there is none.
__device__ __forceinline__ int first_peers(const i64* holders, int begin, int end, int rank) {
  while (begin < end && (int)(holders[begin] >> 32) == rank) ++begin;
  return begin;
}

__device__ __forceinline__ void pull_row(
    const Peers& peers, const Gradients& grads, const Columns& part, i64 holder, u32 row, u32 lane) {
  const Row from = grads.held(peers, holder), into = grads.held(peers, grads.pulled(row, peers.rank));
  for (u32 c0 = lane; c0 < part.count; c0 += SPAN) {
    chunk held[IN_FLIGHT];
    load(from, part, c0, held);
#pragma unroll
    for (int u = 0; u < IN_FLIGHT; ++u)
      if (c0 + 32 * u < part.count) *into.at(part.at(c0 + 32 * u)) = held[u];
  }
}

__device__ __forceinline__ void sum_row(
    const Peers& peers, const Gradients& grads, const Columns& part, const i64* holders, int begin, int end, u32 row,
    u32 lane) {
  const i64 instead = grads.instead(row);
  const Row own = grads.own(row);
  const bool first = instead < 0 && grads.in_place(row);
  const int pulled = grads.has_slot(row) ? first_peers(holders, begin, end, peers.rank) : end;
  const auto from = [&](int j) {
    return j < begin || holders[j] == instead
        ? own
        : grads.held(peers, j == pulled ? grads.pulled(row, peers.rank) : holders[j]);
  };
  for (u32 c0 = lane; c0 < part.count; c0 += SPAN) {
    float sum[IN_FLIGHT][PER_CHUNK];
#pragma unroll
    for (int u = 0; u < IN_FLIGHT; ++u)
#pragma unroll
      for (int i = 0; i < PER_CHUNK; ++i) sum[u][i] = 0.f;
    chunk held[2][IN_FLIGHT];  // two rows are on their way at once
    for (int j = begin - first; j < end; j += 2) {
      load(from(j), part, c0, held[0]);
      if (j + 1 < end) load(from(j + 1), part, c0, held[1]);
      add(held[0], c0, part.count, sum);
      if (j + 1 < end) add(held[1], c0, part.count, sum);
    }
#pragma unroll
    for (int u = 0; u < IN_FLIGHT; ++u)
      if (c0 + 32 * u < part.count) *own.at(part.at(c0 + 32 * u)) = rounded(sum[u]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) return_rows(
    const int* ptr, const i64* holders, u32 rows, chunk* dk, chunk* dv, u32 k_width, u32 width, u32 source,
    u32 count, i64 listed, u32 slot, u32 slots, u32 pull, u32 heads, u32 from, u32 to, const u64* addresses,
    u32* state, int rank, int world) {
  const Peers peers = {addresses, state, rank, world};
  const u32 call = peers.call();
  const Gradients grads = {dk, dv, width, k_width, source, count, listed, slot, slots};
  const Columns columns(heads, from, to, k_width, width);
  const Share mine;
  // A warp looks at the lists of its next 32 rows at once, one per lane.
  for (u32 first = mine.first; first < rows; first += 32 * mine.step) {
    const u32 candidate = first + mine.lane * mine.step;
    int begin = 0, end = 0;
    int theirs = 0;  // entries of peers that are not pulled yet
    bool there = candidate < rows;
    if (there) {
      begin = ptr[candidate];
      end = ptr[candidate + 1];
      for (int j = begin; j < end; ++j) theirs += (int)(holders[j] >> 32) != rank;
      there = pull ? theirs && grads.has_slot(candidate) : end - begin > (listed >= 0) || !grads.in_place(candidate);
      if (!pull && theirs && grads.has_slot(candidate)) --theirs;
    }
    u32 todo = __ballot_sync(0xffffffffu, there && (theirs > 0) == mine.remote);
    for (; todo; todo &= todo - 1) {
      const int at = __ffs(todo) - 1;
      const int start = __shfl_sync(0xffffffffu, begin, at), stop = __shfl_sync(0xffffffffu, end, at);
      const u32 row = first + at * mine.step;
      if (pull)
        pull_row(peers, grads, columns, holders[first_peers(holders, start, stop, rank)], row, mine.lane);
      else
        sum_row(peers, grads, columns, holders, start, stop, row, mine.lane);
    }
  }
  if (!pull && peers.last_block(0)) {
    peers.signal(LEFT, call);
    state[CALLS] = call;
  }
}
