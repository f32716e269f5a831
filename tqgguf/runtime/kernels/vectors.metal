// Vectors that lie across a simdgroup: value i * 32 + lane is the lane's i-th. Their Walsh-Hadamard transform.
namespace tq {

// Unscaled, in natural order, over parts of SIZE values (a power of two of at least 32).
template <int PER_LANE, int SIZE> inline void hadamard(thread float* x, uint lane) {
  UNROLL for (int mask = 1; mask < 32; mask *= 2) {
    UNROLL for (int i = 0; i < PER_LANE; ++i) {
      const float other = simd_shuffle_xor(x[i], ushort(mask));
      x[i] = (lane & uint(mask)) ? other - x[i] : x[i] + other;
    }
  }
  UNROLL for (int half_width = 1; half_width < SIZE / 32; half_width *= 2) {
    UNROLL for (int i = 0; i < PER_LANE; ++i) {
      if ((i & half_width) == 0) {
        const float a = x[i], b = x[i + half_width];
        x[i] = a + b;
        x[i + half_width] = a - b;
      }
    }
  }
}

// A lane's part of a rotation: the factors before the transform, then those after it (1 / sqrt(SIZE) in the latter).
// Without a rotation (SIZE 1) x stays as it is.
template <int PER_LANE, int SIZE> struct Rotation {
  float before[PER_LANE], after[PER_LANE];

  inline void load(const device float* signs, uint lane) {
    if (SIZE == 1) return;
    UNROLL for (int i = 0; i < PER_LANE; ++i) before[i] = signs[(uint(i) * 32u + lane) % uint(SIZE)];
    UNROLL for (int i = 0; i < PER_LANE; ++i) after[i] = signs[uint(SIZE) + (uint(i) * 32u + lane) % uint(SIZE)];
  }
  inline void apply(thread float* x, uint lane) const {
    if (SIZE == 1) return;
    UNROLL for (int i = 0; i < PER_LANE; ++i) x[i] *= before[i];
    hadamard<PER_LANE, larger(SIZE, 32)>(x, lane);
    UNROLL for (int i = 0; i < PER_LANE; ++i) x[i] *= after[i];
  }
  // The inverse: the factors change places.
  inline void undo(thread float* x, uint lane) const {
    if (SIZE == 1) return;
    UNROLL for (int i = 0; i < PER_LANE; ++i) x[i] *= after[i];
    hadamard<PER_LANE, larger(SIZE, 32)>(x, lane);
    UNROLL for (int i = 0; i < PER_LANE; ++i) x[i] *= before[i];
  }
};

// signs: the factors before, then those after, SIZE each.
template <int PER_LANE, int SIZE> inline void rotate(thread float* x, const device float* signs, uint lane) {
  Rotation<PER_LANE, SIZE> rotation;
  rotation.load(signs, lane);
  rotation.apply(x, lane);
}

}  // namespace tq
