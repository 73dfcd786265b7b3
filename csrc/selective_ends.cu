// The state at the end of every chunk, from 0 at its start, and the sum of dt over its rows. With BACK instead what the
// results of a chunk say of the state at its start: the same from behind, of dout and C.
#include "selective.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK) selective_ends(
    const elem* __restrict__ x, const dt_elem* __restrict__ dt, const float4* __restrict__ rate,
    const float4* __restrict__ vectors, float4* __restrict__ ends, float* __restrict__ sums,
    const int* __restrict__ chunks, const int* __restrict__ offsets, u32 channels, u32 blocks) {
  __shared__ float4 vector[ROWS][FOURS];
  const u32 chunk = blockIdx.x / blocks, channel = blockIdx.x % blocks * BLOCK + threadIdx.x;
  const Chunk rows = rows_of(chunks, offsets, chunk);
  load_vectors(vector, vectors, rows);
  __syncthreads();
  if (channel >= channels) return;
  float4 a[FOURS], s[FOURS];
#pragma unroll
  for (u32 n = 0; n < FOURS; ++n) {
    a[n] = rate[(u64)channel * FOURS + n];
    s[n] = make_float4(0, 0, 0, 0);
  }
  x += rows.first * channels + channel, dt += rows.first * channels + channel;
  float sum = 0;
  for (u32 begin = 0; begin < rows.count; begin += AHEAD) {
    float u[AHEAD], d[AHEAD];
#pragma unroll
    for (u32 i = 0; i < AHEAD; ++i) {
      u[i] = d[i] = 0;
      if (begin + i < rows.count) {
#if defined(BACK)
        const u32 row = rows.count - 1 - begin - i;
#else
        const u32 row = begin + i;
#endif
        u[i] = load(x + row * channels), d[i] = load(dt + row * channels);
      }
    }
#pragma unroll
    for (u32 i = 0; i < AHEAD; ++i) {
#if defined(BACK)
      const float4* v = vector[max((int)(rows.count - 1 - begin - i), 0)];
#else
      const float4* v = vector[begin + i];
      u[i] *= d[i];
      sum += d[i];
#endif
#pragma unroll
      for (u32 n = 0; n < FOURS; ++n) {
#if defined(BACK)
        s[n] = decayed(d[i], a[n], plus(s[n], u[i], v[n]));
#else
        s[n] = plus(decayed(d[i], a[n], s[n]), u[i], v[n]);
#endif
      }
    }
  }
  const u64 at = (u64)chunk * channels + channel;
#pragma unroll
  for (u32 n = 0; n < FOURS; ++n) ends[at * FOURS + n] = s[n];
#if !defined(BACK)
  sums[at] = sum;
#endif
}
