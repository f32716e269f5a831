// Threadgroup memory: within bounds, poisoned until it is written, within Metal's limit (or CUDA's, two on a processor), and free of races.
#pragma once
#include "threadgroup.h"

namespace emulator {

#ifdef CUDA_ELEMENTS
constexpr size_t SHARED_LIMIT = 112 * 1024;
#else
constexpr size_t SHARED_LIMIT = 32 * 1024;
#endif

// Who touched an element last. Two accesses are ordered if a threadgroup barrier lies between them, or a simdgroup barrier
// and both threads are of one simdgroup, or one thread made both.
struct Access {
  uint thread = ~0u, epoch = 0, simd_epoch = 0;

  bool conflicts(uint now, uint now_epoch, uint now_simd_epoch) const {
    if (thread == ~0u || thread == now || epoch != now_epoch) return false;
    return thread / LANES != now / LANES || simd_epoch == now_simd_epoch;
  }
};

struct History {
  Access write, read;
  bool by_many_lanes = false;       // the reads since the last barrier of `read`
  bool by_many_simdgroups = false;
};

struct Declared {
  const void* key;
  unsigned char* bytes;
  std::vector<History> history;
};

class SharedMemory {
 public:
  void clear() {
    declared_.clear();
    used_ = 0;
  }

  // The array that a declaration stands for: the same for all threads of a threadgroup.
  Declared& get(const void* key, const char* name, size_t count, size_t element_bytes) {
    for (Declared& d : declared_)
      if (d.key == key) return d;
    const size_t bytes = (count * element_bytes + 15) / 16 * 16;
    if (used_ + bytes > SHARED_LIMIT) stop("threadgroup memory: %s would make it %zu bytes of %zu", name, used_ + bytes, SHARED_LIMIT);
    memset(memory_ + used_, 0xff, bytes);  // NaN in every float type
    declared_.reserve(64);
    declared_.push_back({key, memory_ + used_, std::vector<History>(count)});
    used_ += bytes;
    return declared_.back();
  }

 private:
  alignas(16) unsigned char memory_[SHARED_LIMIT];
  size_t used_ = 0;
  std::vector<Declared> declared_;
};

inline SharedMemory& shared_memory() {
  static SharedMemory m;
  return m;
}

template <class T> class Shared {
 public:
  Shared(Declared& declared, const char* name, size_t start = 0) : d_(&declared), name_(name), start_(start) {}
  Shared operator+(size_t n) const { return Shared(*d_, name_, start_ + n); }

  class Element {
   public:
    Element(Declared& d, const char* name, size_t i) : d_(d), name_(name), i_(i) {}
    operator T() const {
      read(d_, name_, i_);
      T value;
      memcpy(&value, d_.bytes + i_ * sizeof(T), sizeof(T));
      return value;
    }
    Element& operator=(T value) {
      write(d_, name_, i_);
      memcpy(d_.bytes + i_ * sizeof(T), &value, sizeof(T));
      return *this;
    }
    Element& operator=(const Element& other) { return *this = T(other); }

   private:
    Declared& d_;
    const char* name_;
    size_t i_;
  };

  Element operator[](size_t i) const {
    i += start_;
    if (i >= d_->history.size()) stop("threadgroup index out of bounds: %s[%zu] of %zu", name_, i, d_->history.size());
    return Element(*d_, name_, i);
  }

 private:
  static void read(Declared& d, const char* name, size_t i) {
    Threadgroup& g = group();
    History& h = d.history[i];
    const uint me = g.current->index, epoch = g.epoch, simd_epoch = g.simdgroup().epoch;
    if (h.write.thread == ~0u) stop("read of unwritten threadgroup memory: %s[%zu] by thread %u", name, i, me);
    if (h.write.conflicts(me, epoch, simd_epoch)) stop("race: %s[%zu] is read by thread %u and written by %u", name, i, me, h.write.thread);
    if (h.read.epoch != epoch || h.read.thread == ~0u) {
      h.by_many_lanes = h.by_many_simdgroups = false;
    } else if (h.read.thread != me) {
      h.by_many_lanes = true;
      h.by_many_simdgroups = h.by_many_simdgroups || h.read.thread / LANES != me / LANES;
    }
    h.read = {me, epoch, simd_epoch};
  }
  static void write(Declared& d, const char* name, size_t i) {
    Threadgroup& g = group();
    History& h = d.history[i];
    const uint me = g.current->index, epoch = g.epoch, simd_epoch = g.simdgroup().epoch;
    if (h.write.conflicts(me, epoch, simd_epoch)) stop("race: %s[%zu] is written by threads %u and %u", name, i, me, h.write.thread);
    const bool read_now = h.read.thread != ~0u && h.read.epoch == epoch;
    const bool by_others = h.read.conflicts(me, epoch, simd_epoch) || (read_now && h.by_many_simdgroups) ||
                           (read_now && h.by_many_lanes && h.read.simd_epoch == simd_epoch);
    if (by_others) stop("race: %s[%zu] is written by thread %u and read by %u", name, i, me, h.read.thread);
    h.write = {me, epoch, simd_epoch};
  }

  Declared* d_;
  const char* name_;
  size_t start_;
};

}  // namespace emulator

#define SHARED(T, name, n)             \
  static const char shared_key_##name = 0; \
  const emulator::Shared<T> name(emulator::shared_memory().get(&shared_key_##name, #name, (n), sizeof(T)), #name)
#define SHARED_AT_LAUNCH(T, name, n) SHARED(T, name, n)
#define SHARED_POINTER(T) emulator::Shared<T>
