// Sequences of calls of the exchange, drawn by seed, on ranks that get out of step. Rows are checked when a kernel
// would read them, and so are sums, exactly: elements are small whole numbers.
//
//   driver ROUTES FIRST COUNT     COUNT seeds from FIRST on, over the routes of a file; 0: all is well
#include <map>

#include "world.hpp"

enum Stream { MAIN, SIDE, LANE, FIRST };
constexpr u32 FEW_BLOCKS = 2, WHOLE_GPU = 5, WIDEST = 40;  // blocks; blocks; chunks

std::vector<Launch*> launches;
std::vector<std::vector<Launch*>> awaited[4];  // by stream and rank: what its next launch waits for

// The host of one rank in one call: what it enqueues. The order is that of `kernels/peers/` and `ops/`.
struct Host {
  Call& call;
  int rank;
  const Table& table = call.route->tables[rank];

  void wait(Stream stream, Stream other) {
    auto& enqueued = gpus[rank].streams[other];
    if (!enqueued.empty()) awaited[stream][rank].push_back(enqueued.back());
  }

  void enqueue(Stream stream, const char* name, u32 blocks, u32 threads, std::function<void()> body) {
    auto& enqueued = gpus[rank].streams[stream];
    std::vector<Launch*> after = std::move(awaited[stream][rank]);
    awaited[stream][rank].clear();
    if (!enqueued.empty()) after.push_back(enqueued.back());
    std::vector<u32> order(blocks);
    for (u32 i = 0; i < blocks; ++i) order[i] = blocks - 1 - i;
    // In any order, unless one that waits could keep out the one that signals.
    if (blocks != FEW_BLOCKS || gpus[rank].slots > (int)FEW_BLOCKS + 2)
      for (u32 i = blocks; i > 1; --i) std::swap(order[i - 1], order[below(i)]);
    const u64 delay = below(3) ? 0 : below(1u << below(15));
    const std::string title = std::string(name) + " of call " + std::to_string(call.number);
    enqueued.push_back(new Launch{title, rank, threads, {blocks}, std::move(body), std::move(after), delay, order});
    launches.push_back(enqueued.back());
  }

  void signal_wait(
      Direction direction, Stream stream, const char* name, int signaled, int flag, const u32* ranks, Word word,
      u32 ahead, Stream current = MAIN) {
    if (stream == SIDE) wait(SIDE, current);
    u32* state = states[direction][rank].data();
    enqueue(stream, name, 1, 32, [=, rank = rank] {
      ::signal_wait(signaled, flag, word, ahead, ranks, addresses[direction].data(), state, rank, world);
    });
  }

  void push(Stream stream, const char* name, u32 blocks, u32 to_peers, u32 skip, u32 first, u32 last) {
    if (stream == SIDE) wait(SIDE, MAIN);
    enqueue(stream, name, blocks, THREADS, [c = &call, t = &table, rank = rank, to_peers, skip, first, last] {
      push_rows(c->k[rank].data(), c->v[rank].data(), c->k_stride, c->v_stride, c->k_width, c->width(), t->sends.data(),
                t->targets.data(), t->ends.data(), t->partners.data(), c->heads(), c->packed_bounds(), first, last,
                to_peers, skip, addresses[PUSH].data(), states[PUSH][rank].data(), rank, world);
    });
  }

  void to_peers(Stream stream, u32 blocks) {
    if (blocks == WHOLE_GPU)
      signal_wait(PUSH, stream, "wait for ARRIVED", ARRIVED, ARRIVED, table.partners.data() + 1, CALLS, 1);
    push(stream, "to_peers", blocks, 1, 0, 0, call.stages());
  }

  void own_rows(u32 skip = 0) { push(MAIN, "own_rows", WHOLE_GPU, 0, skip, 0, call.stages()); }

  void read(Stream stream, const char* what, i64 from, i64 to) { read(stream, what, from, to, 0, call.stages()); }

  void read(Stream stream, const char* what, i64 from, i64 to, u32 stage, u32 stop) {
    enqueue(stream, what, 1 + below(2), 1, [c = &call, rank = rank, what, from, to, stage, stop] {
      check_rows(*c, rank, what, from, to, stage, stop);
    });
  }

  void gradients() { gradients(MAIN, 0, call.stages()); }

  void gradients(Stream stream, u32 stage, u32 stop) {
    enqueue(stream, "gradients", 1 + below(2), 1, [c = &call, t = &table, rank = rank, stage, stop] {
      write_gradients(*c, rank, 0, t->used, stage, stop);
      write_in_place(*c, rank, t->place[2], IN_PLACE + t->place[0], stage, stop);
    });
  }

  void gradient_rows(Stream stream) { signal_wait(RETURN, stream, "wait for LEFT", -1, LEFT, nullptr, CALLS, 0); }

  void return_to_owners(Stream stream) {
    return_to_owners(stream, 0, call.stages());
    if (stream == SIDE) wait(MAIN, SIDE);
    check_all_sums();
  }

  void return_to_owners(Stream stream, u32 stage, u32 stop) {
    written(stream);
    sum_up(stream, table.place[2], -1, 0, 0, stage, stop);
  }

  void sum_up(Stream stream, i64 in_place, i64 listed, i64 slot, i64 slots, u32 stage, u32 stop) {
    if (stream == SIDE) wait(SIDE, MAIN);
    return_rows(stream, "return_rows", WHOLE_GPU, in_place, listed, slot, slots, 0, stage, stop);
  }

  void pull(i64 in_place, i64 listed, i64 slot, i64 slots) {
    return_rows(SIDE, "pull", FEW_BLOCKS, in_place, listed, slot, slots, 1, 0, call.stages());
  }

  void written(Stream stream, Stream current = MAIN) {
    const u32* ranks = table.partners.data() + 1;
    signal_wait(RETURN, stream, "wait for WRITTEN", WRITTEN, WRITTEN, ranks, CALLS, 1, current);
  }

  void return_rows(
      Stream stream, const char* what, u32 blocks, i64 in_place, i64 listed, i64 slot, i64 slots, u32 pull, u32 stage,
      u32 stop) {
    enqueue(stream, what, blocks, THREADS, [=, c = &call, t = &table, rank = rank] {
      ::return_rows(t->ptr.data(), t->holders.data(), c->size(), c->dk[rank].data(), c->dv[rank].data(), c->k_width,
                    c->width(), t->place[0], in_place, listed, slot, slots, pull, c->heads(), c->bounds[stage],
                    c->bounds[stop], addresses[RETURN].data(), states[RETURN][rank].data(), rank, world);
    });
  }

  void check_all_sums() {
    enqueue(MAIN, "sums", 1, 1, [c = &call, rank = rank] { check_sums(*c, rank); });
  }

  i64 all() const { return table.place[2] ? 0 : (i64)table.sources.size(); }

  // `pushed_attention`; in_one: the kernel makes no cut after all.
  void forward(bool keep, bool in_one) {
    const i64 keys = table.stages[2], in_place = table.place[1];
    const bool cut = table.stages[0] > 0, second = table.stages[3];
    to_peers(SIDE, FEW_BLOCKS);
    own_rows(keep ? 0 : in_place);
    if (keep) wait(SIDE, MAIN), read(SIDE, "kept rows", 0, all());
    if (table.stages[4])
      signal_wait(PUSH, MAIN, "wait for SENT_EARLY", -1, SENT_EARLY, table.partners.data(), STARTED, 0);
    if (cut && (in_place || !in_one)) {
      wait(SIDE, MAIN);
      if (!in_place) read(MAIN, "early part", second ? keys : 0, second ? all() : keys);
      read(SIDE, "late part", second ? 0 : keys, second ? keys : all());
    } else {
      if (cut) wait(MAIN, SIDE);
      read(MAIN, "attention", 0, all());
    }
    wait(MAIN, SIDE);
  }

  // `pushed_attention_backward` of a rank that reads the keys of its early part in place.
  void backward_in_parts(bool kept) {
    const i64 keys = table.stages[2], second = table.stages[3], count = table.place[1], first = second ? keys : 0;
    if (!kept) {
      to_peers(SIDE, FEW_BLOCKS);
      wait(FIRST, MAIN);
      push(FIRST, "own_rows", WHOLE_GPU, 0, count, 0, call.stages());
    }
    gradient_rows(SIDE);
    wait(FIRST, MAIN);
    wait(FIRST, SIDE);
    const i64 from = second ? 0 : keys, to = second ? keys : table.used;
    if (!kept) read(FIRST, "late part backward", from, to);
    enqueue(FIRST, "late gradients", 1 + below(2), 1, [=, c = &call, rank = rank] {
      write_gradients(*c, rank, from, to, 0, c->stages());
    });
    const i64 listed = (i64)rank << 32 | first;
    written(SIDE, FIRST);
    pull(count, listed, first, count);
    enqueue(MAIN, "early gradients", 1 + below(2), 1, [=, c = &call, rank = rank] {
      write_in_place(*c, rank, count, first, 0, c->stages());
    });
    sum_up(SIDE, count, listed, first, count, 0, call.stages());
    wait(MAIN, FIRST);
    wait(MAIN, SIDE);
    check_all_sums();
  }

  // `pushed_attention_backward`.
  void backward(bool kept) {
    if (table.place[1]) return backward_in_parts(kept);
    const bool in_place = table.place[2];
    if (!kept) to_peers(SIDE, in_place ? FEW_BLOCKS : WHOLE_GPU), own_rows();
    gradient_rows(SIDE);
    const i64 count = table.place[2], slots = std::min(count, (i64)call.route->capacity);
    if (in_place)
      written(SIDE), pull(count, -1, 0, slots);
    else
      wait(MAIN, SIDE);
    if (!kept) read(MAIN, "attention backward", 0, all());
    gradients();
    if (!in_place) return return_to_owners(SIDE);
    sum_up(SIDE, count, -1, 0, slots, 0, call.stages());
    wait(MAIN, SIDE);
    check_all_sums();
  }

  Stream of(u32 stage) const { return stage % 2 ? LANE : MAIN; }

  // What `pushed/stages.py` begins with.
  void start_stages() {
    to_peers(SIDE, FEW_BLOCKS);
    push(MAIN, "own_rows", WHOLE_GPU, 0, 0, 0, 1);
    wait(LANE, MAIN);
    push(LANE, "own_rows", WHOLE_GPU, 0, 0, 1, call.stages());
  }

  void wait_for_stage(u32 stage) {
    const int flag = stage + 1 == call.stages() ? SENT : SENT_STAGE + stage;
    if (!table.place[2])
      signal_wait(PUSH, of(stage), "wait for a stage", -1, flag, table.partners.data(), STARTED, 0);
  }

  void join() {
    wait(MAIN, LANE);
    wait(MAIN, SIDE);
  }

  // `pushed.stages.forward`.
  void forward_in_stages(bool keep) {
    start_stages();
    Launch* copied = gpus[rank].streams[LANE].back();
    for (u32 stage = 0; stage < call.stages(); ++stage) {
      if (stage == 2) awaited[MAIN][rank].push_back(copied);
      wait_for_stage(stage);
      read(of(stage), "a stage", 0, all(), stage, stage + 1);
    }
    if (keep) {
      awaited[SIDE][rank].push_back(copied);
      read(SIDE, "kept rows", 0, all());
    }
    join();
  }

  // `pushed.stages.backward`.
  void backward_in_stages(bool kept) {
    Launch* copied = nullptr;
    if (!kept) start_stages(), copied = gpus[rank].streams[LANE].back();
    gradient_rows(MAIN);
    wait(LANE, MAIN);
    for (u32 stage = 0; stage < call.stages(); ++stage) {
      if (stage == 2 && copied) awaited[MAIN][rank].push_back(copied);
      if (!kept) wait_for_stage(stage), read(of(stage), "a stage backward", 0, all(), stage, stage + 1);
      gradients(of(stage), stage, stage + 1);
      wait(SIDE, of(stage));
      return_to_owners(SIDE, stage, stage + 1);
    }
    join();
    check_all_sums();
  }

  // `push_rows` and `return_pushed`.
  void exchange() {
    to_peers(MAIN, WHOLE_GPU);
    own_rows();
    read(MAIN, "copy", 0, all());
  }

  void exchange_back() {
    gradient_rows(MAIN);
    gradients();
    return_to_owners(MAIN);
  }
};

Call draw_call(u32 number, const Route& route) {
  u32 k_width = 1 + below(below(3) ? 5 : WIDEST - 12), v_width = 1 + below(below(3) ? 5 : 12);
  std::vector<u32> bounds = {0, 1};
  if (below(2)) {  // stages
    for (u32 i = 0, more = 1 + below(5); i < more; ++i) bounds.push_back(bounds.back() + 1 + below(2));
    if (bounds.back() <= 12) {
      k_width = bounds.back() * (1 + below(2)), v_width = bounds.back();
    } else {
      bounds = {0, 1};
    }
  }
  Call call = {number, k_width, v_width, k_width + below(3), v_width + below(3), &route, {}, {}, {}, {}, bounds};
  for (int rank = 0; rank < world; ++rank) {
    std::vector<chunk> k(route.rows * call.k_stride), v(route.rows * call.v_stride);
    for (u32 row = 0; row < route.rows; ++row)
      for (u32 c = 0; c < call.width(); ++c)
        (c < k_width ? k[row * call.k_stride + c] : v[row * call.v_stride + c - k_width]) =
            drawn(call, PUSH, rank, row, c);
    call.k.push_back(k), call.v.push_back(v);
    call.dk.emplace_back(route.rows * k_width), call.dv.emplace_back(route.rows * v_width);
  }
  return call;
}

void enqueue_calls(Call& call) {
  const u32 kind = below(6), choice = below(2), in_one = below(6) == 0;
  for (int rank = 0; rank < world; ++rank) {
    Host host = {call, rank};
    if (!call.route->capacity) continue;  // no row travels
    if (kind < 4 && call.stages() > 1) kind < 2 ? host.forward_in_stages(choice) : host.backward_in_stages(choice);
    else if (kind < 2) host.forward(choice, in_one);
    else if (kind < 4) host.backward(choice);
    else if (kind == 4) host.exchange();
    else host.exchange_back();
    host.enqueue(MAIN, "other work", 1, 1, [&call, rank] { overwrite(call, rank); });
  }
}

// Memory as calls before left it. Some numbers of calls are about to wrap.
void start(u32 capacity) {
  const u32 before = below(2) ? 0 : 0u - 1 - below(4);
  const int slots = 3 + (int)below(3);
  const u32 words = HEADER / 4 + capacity * WIDEST * 4;
  symmetric.assign(2 * world * words, ~0u);
  gpus.assign(world, {});
  for (Gpu& gpu : gpus) gpu.slots = slots;
  for (auto& each : awaited) each.assign(world, {});
  for (Direction direction : {PUSH, RETURN}) {
    states[direction].assign(world, std::vector<u32>(8));
    for (auto& state : states[direction]) state[CALLS] = state[STARTED] = before;
    addresses[direction].clear();
    for (int rank = 0; rank < world; ++rank) {
      u32* memory = symmetric.data() + (direction * world + rank) * words;
      std::fill_n(memory, HEADER / 4, before);
      addresses[direction].push_back((u64)memory);
    }
  }
}

u32 run_seed(const std::vector<Route>& routes) {
  draws = 0;
  story.clear();
  world = (int)routes[0].tables.size();
  u32 capacity = 0;
  for (const Route& route : routes) capacity = std::max(capacity, route.capacity);
  start(capacity);
  std::vector<Call> calls;
  const u32 count = 4 + below(5);
  for (u32 i = 0; i < count; ++i) calls.push_back(draw_call(i, routes[below((u32)routes.size())]));
  for (Call& call : calls) enqueue_calls(call);
  run_gpus();
  for (Launch* launch : launches) delete launch;
  launches.clear();
  return count;
}

int main(int, char** arguments) {
  std::ifstream file(arguments[1]);
  std::map<int, std::vector<Route>> routes;  // by number of ranks
  for (int ranks; file >> ranks;) routes[ranks].push_back(read_route(file, ranks));
  const u64 first = std::stoull(arguments[2]), count = std::stoull(arguments[3]);
  u64 calls = 0;
  for (seed = first; seed < first + count; ++seed) {
    auto at = routes.begin();
    std::advance(at, seed % routes.size());
    calls += run_seed(at->second);
  }
  std::printf("%llu seeds, %llu calls, %llu switches\n", count, calls, (u64)switches);
}
