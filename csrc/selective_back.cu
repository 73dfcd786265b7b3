// Gradients inside of every chunk, from the state that enters it and the gradient G of the state that leaves it:
//
//   G_t = dout_t C_t + exp(dt_{t+1} A) G_{t+1}        dB_t = sum over channels of G_t dt_t x_t
//   dx_t = dt_t sum(G_t B_t)                          dC_t = sum over channels of dout_t S_t
//   ddt_t = x_t sum(G_t B_t) + sum(A K_t)             dA = sum over t of dt_t K_t        K_t = G_t exp(dt_t A) S_{t-1}
//
// A channel is FOURS lanes of a warp, with 4 numbers each. States are computed again: once through the chunk, to keep
// every AHEADth, and then, from behind, AHEAD rows from one that was kept. Sums over channels are added lane by lane, warp
// by warp and block by block, always in the same order; `parts` (splits, rows, 2, STATES) has those of dB and dC of every
// `splits`th block of channels.
#include "selective.cuh"

constexpr u32 SIDE = 32 / FOURS;           // channels side by side in a warp
constexpr u32 WIDTH = BLOCK / 32 * SIDE;  // channels of a block
constexpr float LN2 = 0.69314718055994531f;

// Sums of WIDE values over the lanes that differ in bits from BIT to below END. A lane keeps as many of them as there are
// for each lane, at least one, in the first places: the number of the first one is added to `number`.
template <u32 BIT, u32 END, u32 WIDE>
__device__ __forceinline__ void sum_over_lanes(float* value, u32 lane, u32& number) {
  if constexpr (BIT < END) {
    constexpr u32 HALF = WIDE > 1 ? WIDE / 2 : 1;
    if constexpr (WIDE > 1) {
      const bool upper = lane & BIT;
#pragma unroll
      for (u32 i = 0; i < HALF; ++i) {
        const float gives = upper ? value[i] : value[i + HALF], keeps = upper ? value[i + HALF] : value[i];
        value[i] = keeps + __shfl_xor_sync(0xffffffffu, gives, BIT);
      }
      number += upper ? HALF : 0;
    } else {
      value[0] += __shfl_xor_sync(0xffffffffu, value[0], BIT);
    }
    sum_over_lanes<BIT * 2, END, HALF>(value, lane, number);
  }
}

__device__ __forceinline__ float4 times(float4 a, float4 b) {
  return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}
__device__ __forceinline__ float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + (a.z * b.z + a.w * b.w); }

extern "C" __global__ void __launch_bounds__(BLOCK, 7) selective_back(
    const elem* __restrict__ x, const dt_elem* __restrict__ dt, const float4* __restrict__ rate,
    const float4* __restrict__ writes, const float4* __restrict__ looks, const elem* __restrict__ dout,
    const float4* __restrict__ states, float4* __restrict__ back, elem* __restrict__ dx, dt_elem* __restrict__ ddt,
    float* __restrict__ parts, u32 all_rows, const int* __restrict__ chunks, const int* __restrict__ offsets,
    u32 channels, u32 splits) {
  __shared__ float4 write[ROWS][FOURS], look[ROWS][FOURS];
  __shared__ float4 kept[ROWS / AHEAD - 1][BLOCK];
  __shared__ float4 cells[BLOCK / 32][AHEAD][SIDE];  // dt, x, dout and dt x
  __shared__ float sums[BLOCK / 32][AHEAD][2 * STATES];
  const u32 chunk = blockIdx.x / splits, split = blockIdx.x % splits;
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, four = lane % FOURS, side = lane / FOURS;
  const Chunk rows = rows_of(chunks, offsets, chunk);
  const u32 groups = (rows.count + AHEAD - 1) / AHEAD;
  load_vectors(write, writes, rows);
  load_vectors(look, looks, rows);
  __syncthreads();
  for (u32 base = split * WIDTH; base < channels; base += splits * WIDTH) {
    const u32 first = base + warp * SIDE;
    const bool there = first + side < channels;
    const u64 at = ((u64)chunk * channels + first + side) * FOURS + four;
    const float4 zero = make_float4(0, 0, 0, 0);
    const float4 a = there ? rate[(first + side) * FOURS + four] : zero, entered = there ? states[at] : zero;
    float4 s = entered, g = there ? back[at] : zero, da = zero;
    // What a warp reads of a group of rows: 0 where none is, or no channel.
    auto load_cells = [&](u32 group, bool with_dout) {
      __syncwarp();
      for (u32 i = lane; i < AHEAD * SIDE; i += 32) {
        const u32 row = group * AHEAD + i / SIDE, channel = first + i % SIDE;
        const bool real = row < rows.count && channel < channels;
        const u64 from = (rows.first + row) * channels + channel;
        const float d = real ? load(dt + from) : 0, v = real ? load(x + from) : 0;
        cells[warp][i / SIDE][i % SIDE] = make_float4(d, v, real && with_dout ? load(dout + from) : 0, d * v);
      }
      __syncwarp();
    };
    for (u32 group = 0; group + 1 < groups; ++group) {
      load_cells(group, false);
#pragma unroll
      for (u32 i = 0; i < AHEAD; ++i) {
        const float4 cell = cells[warp][i][side];
        s = plus(decayed(cell.x, a, s), cell.w, write[group * AHEAD + i][four]);
      }
      kept[group][threadIdx.x] = s;
    }
    for (u32 group = groups; group-- > 0;) {
      load_cells(group, true);
      s = group ? kept[group - 1][threadIdx.x] : entered;
      float4 before[AHEAD];  // what is left of the state of the row before
#pragma unroll
      for (u32 i = 0; i < AHEAD; ++i) {
        const float4 cell = cells[warp][i][side];
        before[i] = decayed(cell.x, a, s);
        s = plus(before[i], cell.w, write[group * AHEAD + i][four]);
      }
#pragma unroll
      for (int i = AHEAD - 1; i >= 0; --i) {
        const u32 row = group * AHEAD + i;
        const float4 cell = cells[warp][i][side], w = write[row][four];
        g = plus(g, cell.z, look[row][four]);
        const float4 k = times(g, before[i]);
        da = plus(da, cell.x, k);
        const float read = dot(g, w);
        float of_row[2] = {cell.x * read, cell.y * read + LN2 * dot(a, k)};
        u32 number = 0;
        sum_over_lanes<1, FOURS, 2>(of_row, lane, number);
        if (there && row < rows.count) {
          const u64 to = (rows.first + row) * channels + first + side;
          if (FOURS == 1 || number == 0) store(dx + to, of_row[0]);
          if (FOURS == 1 || number == 1) store(ddt + to, of_row[FOURS == 1]);
        }
        const float4 db = plus(zero, cell.w, g), dc = plus(zero, cell.z, plus(before[i], cell.w, w));
        float of_channel[8] = {db.x, db.y, db.z, db.w, dc.x, dc.y, dc.z, dc.w};
        number = 0;
        sum_over_lanes<FOURS, 32, 8>(of_channel, lane, number);
        constexpr u32 MINE = 8 > SIDE ? 8 / SIDE : 1;
#pragma unroll
        for (u32 m = 0; m < MINE; ++m)
          sums[warp][i][(number + m) / 4 * STATES + 4 * four + (number + m) % 4] = of_channel[m];
        g = decayed(cell.x, a, g);
      }
      __syncthreads();
      for (u32 i = threadIdx.x; i < AHEAD * 2 * STATES; i += BLOCK) {
        const u32 row = group * AHEAD + i / (2 * STATES);
        if (row >= rows.count) break;
        float* to = parts + (split * (u64)all_rows + rows.first + row) * (2 * STATES) + i % (2 * STATES);
        float sum = 0;
#pragma unroll
        for (u32 other = 0; other < BLOCK / 32; ++other) sum += sums[other][i / (2 * STATES)][i % (2 * STATES)];
        if (base == split * WIDTH)
          *to = sum;
        else
          atomicAdd(to, sum);  // no other thread adds to it: the order is the same every time; and nothing is waited for
      }
      __syncthreads();
    }
    if (there) back[at] = da;
  }
}
