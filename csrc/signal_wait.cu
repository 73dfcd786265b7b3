// One thread that signals `signaled` to the peers, unless it is -1, then waits for `awaited` of the ranks whose bits
// `ranks` has; null: of all. The number of the call is state[word] + ahead. On the stream that ends calls, CALLS + 1 is
// this call and CALLS + 0 the one before; on another stream this call is STARTED + 0.
#include "peers.cuh"

extern "C" __global__ void signal_wait(
    int signaled, int awaited, u32 word, u32 ahead, const u32* ranks, const u64* addresses, u32* state, int rank,
    int world) {
  if (threadIdx.x) return;
  const Peers peers = {addresses, state, rank, world};
  const u32 call = *(volatile u32*)(state + word) + ahead;
  if (signaled >= 0) {
    __threadfence_system();
    peers.signal((Flag)signaled, call);
  }
  peers.wait_all((Flag)awaited, ranks ? *ranks : ~0u, call);
}
