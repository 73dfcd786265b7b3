// Keys and values of exactly the rows that some rank's pieces need, written by their owner into the expanded rows of
// all ranks of an NVLink domain. Entry i of the lists: local row sends[i] goes to targets[i] = rank << 32 | expanded
// row. Entries for this rank's own expanded rows come first (OWN), then those that peers need at once (EARLY), then the
// rest (LATE); `ends` tells where each part ends.
//
// Rows travel in stages of heads: stage i has the heads from byte i - 1 of `bounds` (0 for the first) up to byte i. Where
// there are several, rows of EARLY and of LATE travel together.
//
// A call is two kinds of launches, in any order or at the same time:
//   to_peers = 0   copies own rows but for the first `skip`, waits for nobody, and, with stage 0, counts the calls that
//                  the main stream has started
//   to_peers = 1   signals ARRIVED, sends the other parts, signals after each, and its last block waits until all rows
//                  for this rank are there. A block waits for a peer's ARRIVED before it writes there; where there are
//                  many blocks, a `signal_wait.cu` before has waited already.
#include "peers.cuh"

enum Part { OWN, EARLY, LATE };

// A row is k_width chunks of k, then v_width chunks of v.
struct Source {
  const chunk *k, *v;
  u64 k_stride, v_stride;
  u32 k_width, width;
  __device__ __forceinline__ const chunk* at(u32 row, u32 c) const {
    return c < k_width ? k + row * k_stride + c : v + row * v_stride + (c - k_width);
  }
};

__device__ __forceinline__ void copy_row(const Source& own, const Columns& part, u32 row, chunk* into, u32 lane) {
  for (u32 c0 = lane; c0 < part.count; c0 += SPAN) {
    chunk held[IN_FLIGHT];
#pragma unroll
    for (int u = 0; u < IN_FLIGHT; ++u)
      if (c0 + 32 * u < part.count) held[u] = *own.at(row, part.at(c0 + 32 * u));
#pragma unroll
    for (int u = 0; u < IN_FLIGHT; ++u)
      if (c0 + 32 * u < part.count) into[part.at(c0 + 32 * u)] = held[u];
  }
}

__device__ __forceinline__ u32 bound(u64 bounds, u32 stage) { return stage ? bounds >> 8 * (stage - 1) & 255 : 0; }

extern "C" __global__ void __launch_bounds__(THREADS, 1) push_rows(
    const chunk* k, const chunk* v, u64 k_stride, u64 v_stride, u32 k_width, u32 width, const int* sends,
    const i64* targets, const u32* ends, const u32* senders, u32 heads, u64 bounds, u32 first_stage, u32 last_stage,
    u32 to_peers, u32 skip, const u64* addresses, u32* state, int rank, int world) {
  const Peers peers = {addresses, state, rank, world};
  const Source own = {k, v, k_stride, v_stride, k_width, width};
  const u32 call = peers.call(), lane = threadIdx.x % 32, step = WARPS * gridDim.x;
  const bool staged = to_peers && last_stage > 1;
  u32 arrived = 1u << rank;  // ranks whose expanded rows may be overwritten
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    if (to_peers) {
      __threadfence_system();
      peers.signal(ARRIVED, call);
    } else if (first_stage == 0) {
      state[STARTED] += 1;
    }
  }
  for (u32 stage = first_stage; stage < last_stage; ++stage) {
    const Columns columns(heads, bound(bounds, stage), bound(bounds, stage + 1), k_width, width);
    for (u32 part = !to_peers ? OWN : staged ? LATE : EARLY; part <= (to_peers ? LATE : OWN); ++part) {
      const u32 begin = part == OWN ? skip : staged ? ends[OWN] : ends[part - 1], end = ends[part];
      // A warp's next 32 entries are read at once, one per lane.
      for (u32 first = begin + threadIdx.x / 32 * gridDim.x + blockIdx.x; first < end; first += 32 * step) {
        const u32 mine = first + lane * step;
        const int sent = mine < end ? sends[mine] : 0;
        const i64 goes = mine < end ? targets[mine] : 0;
        const u32 count = __popc(__ballot_sync(0xffffffffu, mine < end));
        for (u32 i = 0; i < count; ++i) {
          const u32 row = __shfl_sync(0xffffffffu, sent, i);
          const i64 target = __shfl_sync(0xffffffffu, goes, i);
          const int to = (int)(target >> 32);
          if (!(arrived >> to & 1)) {
            peers.wait(ARRIVED, to, call);
            arrived |= 1u << to;
          }
          copy_row(own, columns, row, peers.rows(to) + (u64)(u32)target * width, lane);
        }
      }
      const bool end_of_call = part == LATE && stage + 1 == last_stage;
      if (part == OWN || !peers.last_block(staged ? stage : part - 1)) continue;
      peers.signal(end_of_call ? SENT : part == EARLY ? SENT_EARLY : (Flag)(SENT_STAGE + stage), call);
      if (!end_of_call) continue;
      peers.wait_all(SENT, *senders, call);
      state[CALLS] = call;
    }
  }
}
