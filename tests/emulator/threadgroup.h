// One threadgroup at a time: threads as fibers, simdgroups of 32 in lock step at simd operations and barriers. The order
// of lanes and simdgroups is shuffled, so that nothing can rely on it.
#pragma once
#include <cstdio>
#include <utility>
#include <vector>

#include "fiber.h"

typedef unsigned int uint;
struct uint3 {
  uint x, y, z;
};

namespace emulator {

constexpr uint LANES = 32;
enum class State : uint8_t { running, at_simd_operation, at_barrier, done };
enum Operation : uint8_t { none, simd_barrier, shuffle, shuffle_xor, reduction, matrix };

struct Thread {
  void* stack;
  uint index;
  State state;
  uint8_t operation;
  uint line;         // of the kernel's text, where it waits
  uint n_exchanges;  // simd operations so far
};

struct Simdgroup {
  // What lanes give to each other in one operation. Two turns, so that nobody overwrites what another still has to read.
  alignas(8) unsigned char given[2][LANES][8];
  uint epoch = 0;  // simdgroup barriers since the last threadgroup barrier
};

struct Threadgroup {
  std::vector<Thread> threads;
  std::vector<Simdgroup> simdgroups;
  Thread* current = nullptr;
  uint epoch = 0;  // threadgroup barriers so far
  char error[256] = "";
  uint3 position{}, size{}, count{};

  void (*function)(void*) = nullptr;
  void* arguments = nullptr;
  void* scheduler_stack = nullptr;
  Stacks stacks;
  uint64_t random = 1;

  Simdgroup& simdgroup() { return simdgroups[current->index / LANES]; }
  uint lane() const { return current->index % LANES; }

  // The first error counts; what runs after it is of no interest.
  template <class... Values> bool fail(const char* format, Values... values) {
    if (!error[0]) snprintf(error, sizeof error, format, values...);
    return false;
  }

  void wait(State state, Operation operation, uint line) {
    current->state = state;
    current->operation = operation;
    current->line = line;
    emulator_switch(&current->stack, scheduler_stack);
  }

  // Until every thread is done, or an error.
  bool run() {
    const uint n = uint(threads.size()), n_simdgroups = uint(simdgroups.size());
    std::vector<uint> order(n_simdgroups);
    for (uint i = 0; i < n_simdgroups; ++i) order[i] = i;
    for (;;) {
      for (uint i = n_simdgroups; i > 1; --i) std::swap(order[i - 1], order[next_random() % i]);
      uint n_done = 0;
      for (uint i : order) {
        if (!run_simdgroup(i)) return false;
        n_done += threads[i * LANES].state == State::done;
      }
      if (n_done == n_simdgroups) return true;
      if (n_done) return fail("threadgroup_barrier at line %u is not reached by every thread", waiting_line());
      for (const Thread& t : threads)
        if (t.line != threads[0].line) return fail("threads wait at different barriers, lines %u and %u", threads[0].line, t.line);
      ++epoch;
      for (Simdgroup& s : simdgroups) s.epoch = 0;
      for (uint i = 0; i < n; ++i) threads[i].state = State::running;
    }
  }

  uint64_t next_random() {
    random ^= random << 13;
    random ^= random >> 7;
    random ^= random << 17;
    return random;
  }

 private:
  // Until its threads are done or wait at a threadgroup barrier.
  bool run_simdgroup(uint which) {
    const uint first = which * LANES, n_lanes = std::min(LANES, uint(threads.size()) - first);
    for (;;) {
      const uint turn = next_random() % n_lanes;
      for (uint k = 0; k < n_lanes; ++k) {
        Thread& thread = threads[first + (k + turn) % n_lanes];
        if (thread.state != State::running) continue;
        current = &thread;
        emulator_switch(&scheduler_stack, thread.stack);
        if (error[0]) return false;
      }
      const Thread& lead = threads[first];
      for (uint k = 1; k < n_lanes; ++k) {
        const Thread& t = threads[first + k];
        const bool together = t.state == lead.state && (t.state == State::done || (t.line == lead.line && t.operation == lead.operation));
        if (!together) return fail("divergent simdgroup: lane 0 is at line %u, lane %u at line %u", lead.line, k, t.line);
      }
      if (lead.state != State::at_simd_operation) return true;
      if (lead.operation == simd_barrier) ++simdgroups[which].epoch;
      for (uint k = 0; k < n_lanes; ++k) threads[first + k].state = State::running;
    }
  }

  uint waiting_line() const {
    for (const Thread& t : threads)
      if (t.state != State::done) return t.line;
    return 0;
  }
};

inline Threadgroup& group() {
  static Threadgroup g;
  return g;
}

[[noreturn]] inline void enter_thread() {
  Threadgroup& g = group();
  g.function(g.arguments);
  g.wait(State::done, none, 0);
  abort();
}

// Stop the running thread with an error; it is never resumed.
template <class... Values> [[noreturn]] inline void stop(const char* format, Values... values) {
  group().fail(format, values...);
  group().wait(State::done, none, 0);
  abort();
}

inline void prepare_threads(uint n) {
  Threadgroup& g = group();
  g.threads.resize(n);
  g.simdgroups.assign((n + LANES - 1) / LANES, Simdgroup());
  g.epoch = 0;
  for (uint i = 0; i < n; ++i) g.threads[i] = {g.stacks.start(i, n, enter_thread), i, State::running, none, 0, 0};
}

}  // namespace emulator
