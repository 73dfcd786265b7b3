// The results of every chunk, from the state that enters it.
#include "selective.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK) selective_out(
    const elem* __restrict__ x, const dt_elem* __restrict__ dt, const float4* __restrict__ rate,
    const float4* __restrict__ writes, const float4* __restrict__ looks, const float4* __restrict__ states,
    elem* __restrict__ out, const int* __restrict__ chunks, const int* __restrict__ offsets, u32 channels,
    u32 blocks) {
  __shared__ float4 write[ROWS][FOURS], look[ROWS][FOURS];
  const u32 chunk = blockIdx.x / blocks, channel = blockIdx.x % blocks * BLOCK + threadIdx.x;
  const Chunk rows = rows_of(chunks, offsets, chunk);
  load_vectors(write, writes, rows);
  load_vectors(look, looks, rows);
  __syncthreads();
  if (channel >= channels) return;
  float4 a[FOURS], s[FOURS];
#pragma unroll
  for (u32 n = 0; n < FOURS; ++n) {
    a[n] = rate[(u64)channel * FOURS + n];
    s[n] = states[((u64)chunk * channels + channel) * FOURS + n];
  }
  const u64 first = rows.first * channels + channel;
  x += first, dt += first, out += first;
  for (u32 begin = 0; begin < rows.count; begin += AHEAD) {
    float u[AHEAD], d[AHEAD];
#pragma unroll
    for (u32 i = 0; i < AHEAD; ++i) {
      u[i] = d[i] = 0;
      if (begin + i < rows.count) u[i] = load(x + (begin + i) * channels), d[i] = load(dt + (begin + i) * channels);
    }
#pragma unroll
    for (u32 i = 0; i < AHEAD; ++i) {
      u[i] *= d[i];
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
      for (u32 n = 0; n < FOURS; ++n) {
        const float4 l = look[begin + i][n];
        s[n] = plus(decayed(d[i], a[n], s[n]), u[i], write[begin + i][n]);
        sum.x += s[n].x * l.x, sum.y += s[n].y * l.y, sum.z += s[n].z * l.z, sum.w += s[n].w * l.w;
      }
      if (begin + i < rows.count) store(out + (begin + i) * channels, sum.x + sum.y + (sum.z + sum.w));
    }
  }
}
