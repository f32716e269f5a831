// Runs a compiled kernel over its grid, threadgroup after threadgroup. Faults become errors: a touched guard page, and
// undefined behaviour, which is compiled to trap.
#pragma once
#include <csetjmp>
#include <csignal>

#include "prelude.h"

namespace emulator {

constexpr uint MOST_THREADS = 1024;

inline sigjmp_buf& after_fault() {
  static sigjmp_buf place;
  return place;
}
inline void on_fault(int signal, siginfo_t* info, void*) {
  const Threadgroup& g = group();
  const uint index = g.current ? g.current->index : 0, line = g.current ? g.current->line : 0;
  if (signal == SIGILL || signal == SIGTRAP) {  // what trapping sanitizers raise on x86-64 and on AArch64
    group().fail("undefined behaviour in thread %u, after line %u", index, line);
  } else {
    group().fail("device memory out of bounds: address %p by thread %u, after line %u", info->si_addr, index, line);
  }
  siglongjmp(after_fault(), 1);
}

// Signal handlers while kernels run, on a stack of their own.
class Faults {
 public:
  Faults() {
    stack_t alternate = {memory_, 0, sizeof memory_};
    sigaltstack(&alternate, &old_stack_);
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < N; ++i) sigaction(signals_[i], &action, &old_[i]);
  }
  ~Faults() {
    for (int i = 0; i < N; ++i) sigaction(signals_[i], &old_[i], nullptr);
    sigaltstack(&old_stack_, nullptr);
  }

 private:
  static constexpr int N = 4;
  int signals_[N] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP};
  struct sigaction old_[N];
  stack_t old_stack_;
  char memory_[64 * 1024];
};

inline void run_threadgroup(uint3 position, uint3 size, uint3 count, void (*function)(void*), void* arguments) {
  Threadgroup& g = group();
  g.position = position;
  g.size = size;
  g.count = count;
  g.function = function;
  g.arguments = arguments;
  shared_memory().clear();
  prepare_threads(size.x * size.y * size.z);
  if (sigsetjmp(after_fault(), 1) == 0) g.run();
}

// 0, or 1 with an error. size: threads of a threadgroup; grid: threads in all.
inline int run_grid(void (*function)(void*), void** buffers, const uint* grid, const uint* size, uint64_t seed, char* error) {
  Threadgroup& g = group();
  g.error[0] = 0;
  g.random = seed * 2654435769u + 88172645463325252ull;
  uint count[3];
  for (int i = 0; i < 3; ++i) {
    if (grid[i] % size[i]) g.fail("grid of %u threads is no multiple of threadgroups of %u", grid[i], size[i]);
    count[i] = grid[i] / size[i];
  }
  if (size[0] * size[1] * size[2] > MOST_THREADS) g.fail("threadgroup of more than %u threads", MOST_THREADS);
  Faults faults;
  for (uint i = 0; i < count[0] * count[1] * count[2] && !g.error[0]; ++i)
    run_threadgroup({i % count[0], i / count[0] % count[1], i / (count[0] * count[1])}, {size[0], size[1], size[2]},
                    {count[0], count[1], count[2]}, function, buffers);
  snprintf(error, 256, "%s", g.error);
  return g.error[0] != 0;
}

// MSL's attributes of kernel arguments, as MLX names them.
inline uint3 threadgroup_position_in_grid() { return group().position; }
inline uint3 threadgroups_per_grid() { return group().count; }
inline uint thread_index_in_threadgroup() { return group().current->index; }
inline uint thread_index_in_simdgroup() { return group().lane(); }
inline uint simdgroup_index_in_threadgroup() { return group().current->index / LANES; }

}  // namespace emulator
