// One stack per emulated GPU thread, and the switch from one to another.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>

extern "C" void emulator_switch(void** saved_stack, void* next_stack);

#if defined(__x86_64__)
asm(R"(.text
.globl emulator_switch
.hidden emulator_switch
.type emulator_switch,@function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch,.-emulator_switch
)");
constexpr int SAVED_WORDS = 6, RETURN_WORD = 6;
#elif defined(__aarch64__)
asm(R"(.text
.globl emulator_switch
.hidden emulator_switch
.type emulator_switch,@function
emulator_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size emulator_switch,.-emulator_switch
)");
constexpr int SAVED_WORDS = 20, RETURN_WORD = 11;
#else
#error "the emulator knows how to switch stacks on x86-64 and AArch64 only"
#endif

namespace emulator {

constexpr size_t STACK_BYTES = 64 * 1024;

// Stacks for a threadgroup's threads, mapped once and kept.
class Stacks {
 public:
  // A stack on which `enter` starts when it is switched to. `enter` never returns.
  void* start(unsigned thread, unsigned n_threads, void (*enter)()) {
    if (n_threads > count_) map(n_threads);
    // not all at the same distance from a page's start: they would share one cache set
    uintptr_t top = uintptr_t(memory_) + (thread + 1) * STACK_BYTES - thread % 61 * 64;
    uint64_t* stack = reinterpret_cast<uint64_t*>(top & ~uintptr_t(15));
    *--stack = 0;  // the frame above, as a call would leave it
    if (RETURN_WORD == SAVED_WORDS) *--stack = uint64_t(enter);
    stack -= SAVED_WORDS;
    memset(stack, 0, 8 * SAVED_WORDS);
    stack[RETURN_WORD] = uint64_t(enter);
    return stack;
  }

 private:
  void map(unsigned n) {
    if (memory_) munmap(memory_, count_ * STACK_BYTES);
    memory_ = mmap(nullptr, n * STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory_ == MAP_FAILED) abort();
    count_ = n;
  }

  void* memory_ = nullptr;
  size_t count_ = 0;
};

}  // namespace emulator
