// One thread that tells the peers something, if `told` is a flag, and waits until some of them have told `awaited`: those
// whose bits `ranks` has, all where it is null. The number of the call is state[word] + ahead: on the stream of the call
// that is CALLS + 1, and beside it, SEEN.
#include "symm.cuh"

extern "C" __global__ void meet(
    int told, int awaited, u32 word, u32 ahead, const u32* ranks, const u64* peers, u32* state, int rank, int world) {
  if (threadIdx.x) return;
  const Meeting meeting = {peers, state, rank, world};
  const u32 call = *(volatile u32*)(state + word) + ahead;
  if (told >= 0) {
    __threadfence_system();
    meeting.tell((Flag)told, call);
  }
  meeting.wait_all((Flag)awaited, ranks ? *ranks : ~0u, call);
}
