// States through the chunks of runs, one after another: from those that chunks have at their ends, from 0, to those that
// enter them, in place. With BACK from behind: gradients of the states that leave chunks. A thread takes a number of a
// channel.
//
// Where `cut` lists (run, piece), only these runs are passed through, from 0, and nothing changes: what leaves them goes to
// their pieces in `left`, and if `moves` is given, what decays the state that enters. Else `entered` has what enters each
// run, if any does.
#include "selective.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK) selective_pass(
    float* __restrict__ states, const float* __restrict__ sums, const float* __restrict__ rate,
    const int* __restrict__ spans, const int* __restrict__ cut, const float* __restrict__ entered,
    float* __restrict__ left, float* __restrict__ moves, u32 channels, u32 blocks) {
  const u32 item = blockIdx.x / blocks, at = blockIdx.x % blocks * BLOCK + threadIdx.x;
  const u32 size = channels * STATES;
  if (at >= size) return;
  const u32 run = cut ? cut[2 * item] : item, channel = at / STATES;
  const u32 first = spans[run], count = spans[run + 1] - first;
  const float a = rate[at];
  float s = entered ? entered[(u64)run * size + at] : 0, sum = 0;
  for (u32 begin = 0; begin < count; begin += AHEAD) {
    float end[AHEAD], d[AHEAD];
    u64 chunk[AHEAD];
#pragma unroll
    for (u32 i = 0; i < AHEAD; ++i) {
#if defined(BACK)
      chunk[i] = first + max((int)(count - 1 - begin - i), 0);
#else
      chunk[i] = first + min(begin + i, count - 1);
#endif
      end[i] = states[chunk[i] * size + at], d[i] = sums[chunk[i] * channels + channel];
    }
#pragma unroll
    for (u32 i = 0; i < AHEAD; ++i) {
      if (begin + i >= count) break;
      if (!cut) states[chunk[i] * size + at] = s;
      s = power(d[i] * a) * s + end[i];
      sum += d[i];
    }
  }
  if (!cut) return;
  const u64 piece = (u64)cut[2 * item + 1] * size + at;
  left[piece] = s;
  if (moves) moves[piece] = power(sum * a);
}
