// What the kernels of the selective scan share:
//
//   S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t        o_t = sum(S_t C_t)
//
// of E channels with N numbers each. They stand at STATES places, a power of two; in those that are left over A, B and C
// are 0. Rows lie in runs, which are cut into chunks of ROWS: see `kernels/states/select.py`. A comes with a factor of
// log2(e), since powers are of 2. The elements of x are named by a macro (`rows.cuh`); those of dt are the same, or fp32
// with DT_FP32.
#pragma once
#include "rows.cuh"

constexpr u32 ROWS = 64;
constexpr u32 AHEAD = 8;           // rows that a thread loads at once
constexpr u32 FOURS = STATES / 4;  // places are read and written by fours

#if defined(DT_FP32)
typedef float dt_elem;
#else
typedef elem dt_elem;
#endif

template <class T>
__device__ __forceinline__ float load(const T* at) {
  if constexpr (sizeof(T) == 4)
    return *(const float*)at;
  else
    return widen(*at);
}
template <class T>
__device__ __forceinline__ void store(T* at, float x) {
  if constexpr (sizeof(T) == 4)
    *(float*)at = x;
  else
    *at = narrow(x);
}

__device__ __forceinline__ float power(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A state behind dt d, and with u B added: of four numbers of a channel.
__device__ __forceinline__ float4 decayed(float d, float4 a, float4 s) {
  return make_float4(power(d * a.x) * s.x, power(d * a.y) * s.y, power(d * a.z) * s.z, power(d * a.w) * s.w);
}
__device__ __forceinline__ float4 plus(float4 s, float u, float4 v) {
  return make_float4(s.x + u * v.x, s.y + u * v.y, s.z + u * v.z, s.w + u * v.w);
}

struct Chunk {
  u64 first;
  u32 count;
};
// The rows of a chunk. chunks: (C, 2), the run of each and its number in the run. offsets: of runs.
__device__ __forceinline__ Chunk rows_of(const int* chunks, const int* offsets, u32 chunk) {
  const int run = chunks[2 * chunk];
  const u32 first = offsets[run] + chunks[2 * chunk + 1] * ROWS;
  return {first, min(ROWS, offsets[run + 1] - first)};
}

// B or C (rows, STATES) of a chunk, 0 behind its last row. All threads of a block call it, and wait before they read.
__device__ __forceinline__ void load_vectors(float4 (*into)[FOURS], const float4* from, Chunk rows) {
  for (u32 i = threadIdx.x; i < ROWS * FOURS; i += BLOCK)
    into[i / FOURS][i % FOURS] = i < rows.count * FOURS ? from[rows.first * FOURS + i] : make_float4(0, 0, 0, 0);
}
