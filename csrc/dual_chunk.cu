// The dual-chunk order from cu_seqlens on the device, with no copy to the host. A padded document of P tokens is cut
// into 2 cp chunks of P / (2 cp); rank r holds chunks r and 2 cp - 1 - r, document after document.
//
//   cp 2, one document of 8    tokens 0 1 2 3 4 5 6 7    rank 0: 0 1 6 7    rank 1: 2 3 4 5
//
// Rows past the last document (capacity) are -1 in tokens_of and keep their own place in slots_of.
#include "rows.cuh"

__device__ __forceinline__ u32 document_of(const int* cu, u32 documents, int token) {
  u32 low = 0, high = documents;  // cu[low] <= token < cu[high]
  while (high - low > 1) {
    const u32 middle = (low + high) / 2;
    if (cu[middle] <= token) low = middle; else high = middle;
  }
  return low;
}

// tokens_of[t] = global token of row t of `rank`; valid[d] = real tokens of document d on that rank.
extern "C" __global__ void __launch_bounds__(256) dual_chunk_rank(
    const int* __restrict__ cu_padded, const int* __restrict__ cu_real, int* __restrict__ tokens_of,
    int* __restrict__ valid, u32 documents, u32 local_rows, int cp, int rank) {
  const u32 t = blockIdx.x * 256 + threadIdx.x;
  if (t < local_rows) {
    const int scaled = (int)t * cp;
    int token = -1;
    if (documents > 0 && scaled < cu_padded[documents]) {
      const u32 d = document_of(cu_padded, documents, scaled);
      const int half = (cu_padded[d + 1] - cu_padded[d]) / (2 * cp);
      const int at = (int)t - cu_padded[d] / cp;
      token = cu_padded[d] + at + half * (at < half ? rank : 2 * (cp - 1) - rank);
    }
    tokens_of[t] = token;
  }
  if (t < documents) {
    const int real = cu_real[t + 1] - cu_real[t], c = (cu_padded[t + 1] - cu_padded[t]) / (2 * cp);
    valid[t] = min(max(real - rank * c, 0), c) + min(max(real - (2 * cp - 1 - rank) * c, 0), c);
  }
}

// slots_of[g] = row of global token g in the gathered buffer (owner rank * local_rows + local row).
extern "C" __global__ void __launch_bounds__(256) dual_chunk_gathered(
    const int* __restrict__ cu_padded, int* __restrict__ slots_of, u32 documents, u32 local_rows, int cp) {
  const u32 g = blockIdx.x * 256 + threadIdx.x;
  if (g >= local_rows * cp) return;
  int slot = (int)g;
  if (documents > 0 && (int)g < cu_padded[documents]) {
    const u32 d = document_of(cu_padded, documents, (int)g);
    const int half = (cu_padded[d + 1] - cu_padded[d]) / (2 * cp);
    const int at = (int)g - cu_padded[d], part = at / half;
    const int owner = part < cp ? part : 2 * cp - 1 - part;
    slot = owner * (int)local_rows + cu_padded[d] / cp + at - half * part + (part < cp ? 0 : half);
  }
  slots_of[g] = slot;
}
