// GPUs on one CPU thread: every CUDA thread is a fiber, and a seeded scheduler draws which one goes on at every `step`.
// Deadlock is seen exactly: a thread that sleeps in a wait goes on when some flag was stored since it looked, so where
// nobody is ready nobody ever will be.
//
// Per GPU: four streams, whose launches run in order and after those that they wait for; at most `slots` blocks at once,
// those of streams 1 and 3 first, each there until it ends. Threads may hold back what they store in `symmetric` memory
// until a fence, their own or one after a barrier of their block; all other memory is sequentially consistent.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

struct Dim {
  uint32_t x;
};

struct Launch {
  std::string name;
  int rank;
  uint32_t threads;
  Dim grid;
  std::function<void()> body;
  std::vector<Launch*> after;
  uint64_t delay;               // steps between the end of what it waits for and its start
  std::vector<uint32_t> order;  // blocks that have not started, the next one last
  uint64_t due = 0;
  uint32_t ended = 0;  // blocks
  bool known = false;  // `due` is
  bool done() const { return ended == grid.x; }
};

struct Store {
  uint32_t* at;
  std::array<uint32_t, 4> value;
  void carry_out() const { std::copy(value.begin(), value.end(), at); }
};

struct Block {
  Launch* launch;
  Dim index;
  uint32_t live;  // threads
  bool holds_back;
  uint32_t waiting = 0;  // at the barrier
  std::vector<struct Warp*> warps = {};
  std::vector<Store> held = {};  // from before a barrier
};

struct Thread {
  Dim index;
  struct Warp* warp;
  jmp_buf at;
  ucontext_t start;
  std::unique_ptr<char[]> stack;
  bool started = false;
  uint64_t value, result;  // of a warp's intrinsic
  int from;
  std::vector<Store> held;
  uint32_t bit() const { return 1u << index.x % 32; }
};

struct Warp {
  Block* block;
  uint32_t live, patience;  // lanes, a bit each; one of about `patience` draws is taken
  uint32_t ready = 0, arrived = 0;
  int where = -1, kind = 0;  // in the ready list of its rank; of the intrinsic that lanes wait in
  std::vector<Thread*> threads = {};
};

struct Gpu {
  std::vector<Launch*> streams[4];
  size_t next[4] = {0, 0, 0, 0};
  int resident = 0, slots = 2;
  uint32_t weight = 1;  // how often it is drawn
  std::vector<Warp*> ready;
};

inline Thread* now = nullptr;  // null: the scheduler
inline jmp_buf scheduler;
inline int64_t fuel = 0;  // steps until the scheduler draws again
inline std::vector<uint32_t> symmetric;  // memory of all ranks
inline uint64_t seed = 0, draws = 0, steps = 0, switches = 0;
inline std::vector<Gpu> gpus;
inline std::vector<Thread*> spare, asleep;
inline std::vector<std::string> story;

inline uint64_t mixed(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return x ^ x >> 31;
}
inline uint32_t below(uint32_t n) { return mixed((seed << 40) + 0x9e3779b97f4a7c15ull * ++draws) % n; }

inline void note(const Launch* launch, const char* what) {
  story.push_back("rank " + std::to_string(launch->rank) + ": " + launch->name + what);
}

[[noreturn]] inline void fail(const std::string& what) {
  for (size_t i = story.size() > 40 ? story.size() - 40 : 0; i < story.size(); ++i) std::puts(story[i].c_str());
  std::printf("seed %llu: %s\n", (unsigned long long)seed, what.c_str());
  std::fflush(stdout);
  std::_Exit(1);
}

inline void set_ready(Warp* warp, uint32_t lanes) {
  auto& list = gpus[warp->block->launch->rank].ready;
  const bool was = warp->ready, is = lanes;
  warp->ready = lanes;
  if (is && !was) {
    warp->where = (int)list.size();
    list.push_back(warp);
  } else if (was && !is) {
    list[warp->where] = list.back();
    list[warp->where]->where = warp->where;
    list.pop_back();
  }
}

__attribute__((noinline)) inline void leave() {
  ++switches;
  if (_setjmp(now->at) == 0) _longjmp(scheduler, 1);
}

// Until somebody sets it ready.
inline void rest() {
  set_ready(now->warp, now->warp->ready & ~now->bit());
  leave();
}

inline void step() {
  if (--fuel <= 0 && now) leave();
}

inline void carry_out(std::vector<Store>& held) {
  for (const Store& store : held) store.carry_out();
  held.clear();
}

inline void end_thread() {
  Warp* warp = now->warp;
  Block* block = warp->block;
  carry_out(now->held);
  warp->live &= ~now->bit();
  set_ready(warp, warp->ready & ~now->bit());
  spare.push_back(now);
  if (--block->live == 0) {
    carry_out(block->held);
    if (++block->launch->ended == block->launch->grid.x) note(block->launch, " has ended");
    --gpus[block->launch->rank].resident;
    for (Warp* each : block->warps) delete each;
    delete block;
  }
  leave();
}

inline void thread_main() {
  for (;;) {
    now->warp->block->launch->body();
    end_thread();
  }
}

inline Thread* take_thread() {
  constexpr size_t STACK = 32 << 10;
  if (spare.empty()) {
    Thread* thread = new Thread;
    thread->stack.reset(new char[STACK]);
    getcontext(&thread->start);
    thread->start.uc_stack.ss_sp = thread->stack.get();
    thread->start.uc_stack.ss_size = STACK;
    makecontext(&thread->start, thread_main, 0);
    return thread;
  }
  Thread* thread = spare.back();
  spare.pop_back();
  return thread;
}

inline void start_block(Launch* launch) {
  if (launch->order.size() == launch->grid.x) note(launch, " starts");
  Block* block = new Block{launch, {launch->order.back()}, launch->threads, below(2) == 0};
  launch->order.pop_back();
  constexpr uint32_t patience[] = {1, 1, 1, 1, 8, 100};
  for (uint32_t first = 0; first < launch->threads; first += 32) {
    const uint32_t lanes = std::min(32u, launch->threads - first);
    Warp* warp = new Warp{block, lanes == 32 ? ~0u : (1u << lanes) - 1, patience[below(6)]};
    for (uint32_t lane = 0; lane < lanes; ++lane) {
      Thread* thread = take_thread();
      thread->index = {first + lane};
      thread->warp = warp;
      warp->threads.push_back(thread);
    }
    block->warps.push_back(warp);
    set_ready(warp, warp->live);
  }
  ++gpus[launch->rank].resident;
}

// Starts blocks where there is room. Returns the step at which a launch is due, 0 if none is.
inline uint64_t start_blocks(Gpu& gpu) {
  uint64_t due = 0;
  for (int s : {1, 3, 0, 2}) {
    while (gpu.next[s] < gpu.streams[s].size() && gpu.streams[s][gpu.next[s]]->done()) ++gpu.next[s];
    if (gpu.next[s] == gpu.streams[s].size()) continue;
    Launch* launch = gpu.streams[s][gpu.next[s]];
    bool may = true;
    for (const Launch* other : launch->after) may = may && other->done();
    if (!may) continue;
    if (!launch->known) launch->due = steps + launch->delay;
    launch->known = true;
    if (launch->due <= steps)
      while (gpu.resident < gpu.slots && !launch->order.empty()) start_block(launch);
    else if (!due || launch->due < due)
      due = launch->due;
  }
  return due;
}

inline Warp* draw_warp() {
  uint32_t total = 0;
  for (Gpu& gpu : gpus) {
    if (below(1000) == 0) gpu.weight = 1u << 3 * below(4);
    if (!gpu.ready.empty()) total += gpu.weight;
  }
  uint32_t at = below(total);
  size_t drawn = 0;
  for (;; ++drawn) {
    if (gpus[drawn].ready.empty()) continue;
    if (at < gpus[drawn].weight) break;
    at -= gpus[drawn].weight;
  }
  auto& ready = gpus[drawn].ready;
  Warp* warp = ready[below((uint32_t)ready.size())];
  for (int i = 0; i < 8 && below(warp->patience); ++i) warp = ready[below((uint32_t)ready.size())];
  return warp;
}

__attribute__((noinline)) inline void resume(Thread* thread) {
  now = thread;
  if (_setjmp(scheduler) == 0) {
    if (now->started) _longjmp(now->at, 1);
    now->started = true;
    setcontext(&now->start);
  }
  now = nullptr;
}

// Some steps of one warp. It is gone once its block has ended.
inline void burst(Warp* warp) {
  const Launch* launch = warp->block->launch;
  const uint32_t ended = launch->ended;
  const int64_t given = 1 + below(1u << below(10));
  fuel = given;
  while (fuel > 0 && launch->ended == ended && warp->ready) {
    uint32_t lane = below(32);
    while (!(warp->ready >> lane & 1)) lane = (lane + 1) % 32;
    --fuel;
    resume(warp->threads[lane]);
  }
  steps += (uint64_t)(given - std::max<int64_t>(fuel, 0));
}

[[noreturn]] inline void fail_stuck() {
  std::string what = "deadlock:";
  for (const Thread* thread : asleep)
    if (thread->index.x % 32 == 0) {
      const Block* block = thread->warp->block;
      what += " rank " + std::to_string(block->launch->rank) + " waits in block " + std::to_string(block->index.x) +
              " of " + block->launch->name + ";";
    }
  fail(what);
}

// All launches of all GPUs.
inline void run_gpus() {
  for (;;) {
    uint64_t due = 0;
    bool ready = false, left = false;
    for (Gpu& gpu : gpus) {
      const uint64_t next = start_blocks(gpu);
      if (next && (!due || next < due)) due = next;
      ready |= !gpu.ready.empty();
      for (int s = 0; s < 4; ++s) left |= gpu.next[s] < gpu.streams[s].size();
    }
    if (ready) burst(draw_warp());
    else if (due) steps = due;
    else if (left) fail_stuck();
    else return;
  }
}
