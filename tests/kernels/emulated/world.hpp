// The ranks' memory and the routes between them; what rows and sums must be.
#pragma once
#include <cstring>
#include <fstream>

#include "cuda_on_threads.hpp"
#include "peers.cuh"

extern "C" void push_rows(
    const chunk* k, const chunk* v, u64 k_stride, u64 v_stride, u32 k_width, u32 width, const int* sends,
    const i64* targets, const u32* ends, const u32* senders, u32 heads, u64 bounds, u32 first_stage, u32 last_stage,
    u32 to_peers, u32 skip, const u64* addresses, u32* state, int rank, int world);
extern "C" void signal_wait(
    int signaled, int awaited, u32 word, u32 ahead, const u32* ranks, const u64* addresses, u32* state, int rank,
    int world);
extern "C" void return_rows(
    const int* ptr, const i64* holders, u32 rows, chunk* dk, chunk* dv, u32 k_width, u32 width, u32 source, u32 count,
    i64 listed, u32 slot, u32 slots, u32 pull, u32 heads, u32 from, u32 to, const u64* addresses, u32* state, int rank, int world);

struct Table {  // of one rank: see `push_route`. sources: owner * R + row of every expanded row that is copied, of which
// `used` count
  std::vector<int> sends, ptr;
  std::vector<i64> targets, holders, stages, place, sources;
  std::vector<u32> ends, partners;
  u32 used;
  bool in_place(i64 row) const { return row >= place[0] && row < place[0] + place[2]; }
};

struct Route {
  u32 rows, capacity;
  std::vector<Table> tables;
  std::vector<std::vector<i64>> readers;  // of every row of all ranks, as rank << 32 | expanded row
};

enum Direction { PUSH, RETURN };

struct Call {
  u32 number, k_width, v_width, k_stride, v_stride;
  const Route* route;
  std::vector<std::vector<chunk>> k, v, dk, dv;  // of every rank
  std::vector<u32> bounds;  // heads before each stage, and all heads
  u32 width() const { return k_width + v_width; }
  u32 size() const { return route->rows; }
  u32 heads() const { return bounds.back(); }
  u32 stages() const { return (u32)bounds.size() - 1; }
  u64 packed_bounds() const {
    u64 made = 0;
    for (u32 i = 0; i < stages(); ++i) made |= (u64)bounds[i + 1] << 8 * i;
    return made;
  }
  // Whether chunk c of a row is of the heads of stages [from, to).
  bool has(u32 c, u32 from, u32 to) const {
    const u32 head = c < k_width ? c / (k_width / heads()) : (c - k_width) / (v_width / heads());
    return head >= bounds[from] && head < bounds[to];
  }
};

inline int world;
inline std::vector<std::vector<u32>> states[2];
inline std::vector<u64> addresses[2];  // of the ranks' symmetric memory

template <class T>
void read(std::ifstream& file, std::vector<T>& into) {
  size_t count = 0;
  file >> count;
  into.resize(count);
  for (T& each : into) file >> each;
}

inline Route read_route(std::ifstream& file, int ranks) {
  Route route;
  file >> route.rows >> route.capacity;
  route.tables.resize(ranks);
  route.readers.resize(ranks * route.rows);
  for (int rank = 0; rank < ranks; ++rank) {
    Table& t = route.tables[rank];
    file >> t.used;
    read(file, t.sends), read(file, t.targets), read(file, t.ends), read(file, t.partners), read(file, t.ptr);
    read(file, t.holders), read(file, t.stages), read(file, t.place), read(file, t.sources);
    if (!file) fail("the file of routes ends too soon");
    for (u32 e = 0; e < t.used; ++e) route.readers[t.sources[e]].push_back((i64)rank << 32 | e);
  }
  return route;
}

inline chunk* rows_of(Direction direction, int rank) { return (chunk*)(addresses[direction][rank] + HEADER); }

// Elements of rows (owner, row) and of gradients (reader, expanded row; IN_PLACE + local row): others in every call.
constexpr i64 IN_PLACE = 1 << 20;
inline float element(const Call& call, Direction direction, i64 rank, i64 row, u32 column) {
  const u64 key = mixed(seed * 64 + call.number * 2 + direction + 1) + (u64)(rank << 40 | row << 16 | column);
  return (float)(mixed(key) & 0xfff);
}

inline chunk packed(const float* x) {
  chunk made;
  std::memcpy((void*)&made, x, sizeof(chunk));
  return made;
}

inline chunk drawn(const Call& call, Direction direction, i64 rank, i64 row, u32 c) {
  float x[4];
  for (u32 i = 0; i < 4; ++i) x[i] = element(call, direction, rank, row, 4 * c + i);
  return packed(x);
}

inline void check(
    const Call& call, int rank, const char* what, i64 row, u32 c, const chunk& at, const chunk& expected) {
  chunk found;
  found = at;
  if (!std::memcmp(&found, &expected, sizeof(chunk))) return;
  fail(std::string(what) + ": rank " + std::to_string(rank) + " of " + std::to_string(world) + ", call " +
       std::to_string(call.number) + ", row " + std::to_string(row) + ", chunk " + std::to_string(c));
}

// These run as kernels.

inline void check_rows(const Call& call, int rank, const char* what, i64 from, i64 to, u32 stage, u32 stop) {
  const auto& sources = call.route->tables[rank].sources;
  for (i64 e = from + blockIdx.x; e < to; e += gridDim.x)
    for (u32 c = 0; c < call.width(); ++c)
      if (call.has(c, stage, stop)) check(call, rank, what, e, c, rows_of(PUSH, rank)[e * call.width() + c],
            drawn(call, PUSH, sources[e] / call.size(), sources[e] % call.size(), c));
}

inline void write_gradients(const Call& call, int rank, i64 from, i64 to, u32 stage, u32 stop) {
  for (i64 e = from + blockIdx.x; e < to; e += gridDim.x)
    for (u32 c = 0; c < call.width(); ++c)
      if (call.has(c, stage, stop)) rows_of(RETURN, rank)[e * call.width() + c] = drawn(call, RETURN, rank, e, c);
}

// Of so many rows, those of expanded rows from `first` on.
inline void write_in_place(Call& call, int rank, i64 count, i64 first, u32 stage, u32 stop) {
  const i64 source = call.route->tables[rank].place[0];
  for (i64 row = source + blockIdx.x; row < source + count; row += gridDim.x)
    for (u32 c = 0; c < call.width(); ++c)
      if (call.has(c, stage, stop)) (c < call.k_width ? call.dk[rank][row * call.k_width + c]
                        : call.dv[rank][row * call.v_width + c - call.k_width]) =
          drawn(call, RETURN, rank, first + row - source, c);
}

inline void check_sums(const Call& call, int rank) {
  for (u32 row = 0; row < call.size(); ++row)
    for (u32 c = 0; c < call.width(); ++c) {
      float sum[4] = {0, 0, 0, 0};
      if (call.route->tables[rank].in_place(row))
        for (u32 i = 0; i < 4; ++i) sum[i] += element(call, RETURN, rank, IN_PLACE + row, 4 * c + i);
      for (const i64 reader : call.route->readers[rank * call.size() + row])
        for (u32 i = 0; i < 4; ++i) sum[i] += element(call, RETURN, reader >> 32, (u32)reader, 4 * c + i);
      const chunk& found = c < call.k_width ? call.dk[rank][row * call.k_width + c]
                                            : call.dv[rank][row * call.v_width + c - call.k_width];
      check(call, rank, "sums", row, c, found, packed(sum));
    }
}

// Memory that was given back is the main stream's to write.
inline void overwrite(Call& call, int rank) {
  for (auto* x : {&call.k, &call.v, &call.dk, &call.dv})
    std::memset((void*)(*x)[rank].data(), 0xff, (*x)[rank].size() * sizeof(chunk));
}
