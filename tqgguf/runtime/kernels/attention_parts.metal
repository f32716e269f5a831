// Parts of decode attention: what a simdgroup does with a step of STEP = 16 * KEY_TILES keys.
// Scores are computed as S^T = K Q^T and outputs as O^T += V^T P^T, on fragments whose first factor is expanded from codes
// in registers. In a tile of 16 keys a lane has keys key_of(row) and key_of(row) + 2 of K, and keys 4 * pair .. + 3 of V.
namespace tq {

inline uint key_of(uint row) { return 4u * (row >> 1) + (row & 1u); }

// Rows of one KV head as a step reads them; row 0 is the step's first. Rows after `last` repeat it.
template <bool CLAMPED> struct StepRows {
  const device uchar* codes;
  const device half* scales;
  uint stride;  // bytes from row to row
  uint last;

  // Row i + ahead: added apart, so that a constant distance is part of a load.
  inline const device uchar* row(uint i, uint ahead) const {
    return CLAMPED ? codes + metal::min(i + ahead, last) * stride : codes + ulong(i * stride) + ulong(ahead * stride);
  }
};

template <int TYPE_, int DIM_, int GROUP_, int SHIFT_> struct KeyLayout {
  typedef Part<TYPE_, DIM_, GROUP_, 4> part;
  enum : int { type = TYPE_, groups = DIM_ / GROUP_, slices = GROUP_ / 16, shift = SHIFT_, scales = has_scale(TYPE_) ? groups : 1 };
};
template <int TYPE_, int DIM_, int GROUP_, int SHIFT_> struct ValueLayout {
  typedef Part<TYPE_, DIM_, GROUP_, 8> part;
  enum : int { type = TYPE_, dim = DIM_, group = GROUP_, groups = DIM_ / GROUP_, slices = GROUP_ / 16, shift = SHIFT_, scales = has_scale(TYPE_) ? groups : 1 };
};

// Scales of this lane's two keys a tile, as they come from memory until they are needed: waiting for them would be
// waiting for all of a step's loads. Where a row has one, those of four neighbouring keys come together.
template <class L, int KEY_TILES> struct StepScales {
  enum : int { words = (L::scales + 1) / 2 };
  uint raw[KEY_TILES][2][words];

  inline void load(const device half* scales, uint lane) {
    const uint row = row_of(lane);
    UNROLL for (int u = 0; u < KEY_TILES; ++u) {
      if (L::scales == 1) {
        const uint2 four = ((const device uint2*)scales)[uint(4 * u) + (row >> 1)];
        raw[u][0][0] = four.x;
        raw[u][1][0] = four.y;
      } else {
        UNROLL for (int e = 0; e < 2; ++e)
          load_bytes<2 * L::scales, alignment_of(2 * L::scales)>((const device uchar*)(scales + (key_of(row) + uint(16 * u + 2 * e)) * uint(L::scales)), raw[u][e]);
      }
    }
  }

  // Of group g, as two f16.
  inline uint pair(int u, int g, uint lane) const {
    if (L::scales == 1) return halves_at(raw[u][0][0], raw[u][1][0], row_of(lane) & 1u);
    return g % 2 ? high_halves(raw[u][0][g / 2], raw[u][1][g / 2]) : low_halves(raw[u][0][g / 2], raw[u][1][g / 2]);
  }
};

// K of a step: this lane's codes of its two keys a tile, and the keys' scales.
template <class L, int KEY_TILES> struct StepKeys {
  uint low[KEY_TILES][2][L::groups][L::part::low_words];
  uint high[KEY_TILES][2][L::groups][L::part::high_words];
  StepScales<L, KEY_TILES> scales;

  template <bool CLAMPED> inline void load(StepRows<CLAMPED> rows, uint lane) {
    UNROLL for (int u = 0; u < KEY_TILES; ++u) {
      UNROLL for (int e = 0; e < 2; ++e) {
        const device uchar* row = rows.row(key_of(row_of(lane)), uint(16 * u + 2 * e));
        UNROLL for (int g = 0; g < L::groups; ++g) L::part::load(row, g, pair_of(lane), low[u][e][g], high[u][e][g]);
      }
    }
    if (has_scale(L::type)) scales.load(rows.scales, lane);
  }
};

// V of a step: codes of this lane's four keys a tile, row by row or as tiles have them, and the scales of its two.
template <class L, int KEY_TILES, bool TILED> struct StepValues {
  uint low[KEY_TILES][4][L::groups][L::part::low_words];
  uint high[KEY_TILES][4][L::groups][L::part::high_words];
  StepScales<L, KEY_TILES> scales;

  template <bool CLAMPED> inline void load(StepRows<CLAMPED> rows, uint lane) {
    UNROLL for (int u = 0; u < KEY_TILES; ++u) {
      UNROLL for (int e = 0; e < 4; ++e) {
        const device uchar* row = rows.row(4u * pair_of(lane), uint(16 * u + e));
        UNROLL for (int g = 0; g < L::groups; ++g) L::part::load(row, g, row_of(lane), low[u][e][g], high[u][e][g]);
      }
    }
    if (has_scale(L::type)) scales.load(rows.scales, lane);
  }

  // The first factor of slice j: values 2 * j and 2 * j + 1 of the lane's part, of its four keys.
  inline void factor(int u, int g, int j, SHARED_POINTER(uint) table, uint address, thread uint* a) const {
    uint x[4];
    UNROLL for (int e = 0; e < 4; ++e) x[e] = L::part::template values<L::shift>(low[u][e][g], high[u][e][g], j, table, address);
    a[0] = low_halves(x[0], x[1]);
    a[1] = high_halves(x[0], x[1]);
    a[2] = low_halves(x[2], x[3]);
    a[3] = high_halves(x[2], x[3]);
  }
};
template <class L, int KEY_TILES> struct StepValues<L, KEY_TILES, true> {
  typedef Tile<L::type, L::dim, L::group> tile;
  uint words[KEY_TILES][L::groups][tile::words];
  StepScales<L, KEY_TILES> scales;

  inline void load(StepRows<false> rows, uint lane) {
    UNROLL for (int u = 0; u < KEY_TILES; ++u)
      UNROLL for (int g = 0; g < L::groups; ++g) tile::load(rows.codes + u * tile::tile_bytes, g, 4u * row_of(lane) + pair_of(lane), words[u][g]);
    scales.load(rows.scales, lane);
  }

  inline void factor(int u, int g, int j, SHARED_POINTER(uint) table, uint address, thread uint* a) const {
    UNROLL for (int i = 0; i < 4; ++i) a[i] = tile::template values<L::shift>(words[u][g], 4 * j + i, table, address);
  }
};

// Products of keys with query columns: element i of a tile's four is key key_of(row) + 2 * (i / 2), column 2 * pair + i % 2.
// query: fragments in the order of the keys' codes. factor: of this lane's two columns a tile. offset: added.
template <class L, int TILES, int KEY_TILES>
inline void score(const thread StepKeys<L, KEY_TILES>& keys, SHARED_POINTER(half) query, const thread float (&factor)[TILES][2],
                  const thread float (&offset)[TILES][2], SHARED_POINTER(uint) table, uint address, uint lane,
                  thread float (&scores)[KEY_TILES][TILES][4]) {
  float sums[KEY_TILES][TILES][4];
  UNROLL for (int g = 0; g < L::groups; ++g) {
    const bool first = g == 0 || has_scale(L::type), last = g == L::groups - 1 || has_scale(L::type);
    if (first) {
      UNROLL for (int u = 0; u < KEY_TILES; ++u)
        UNROLL for (int t = 0; t < TILES; ++t)
          UNROLL for (int i = 0; i < 4; ++i) sums[u][t][i] = 0.0f;
    }
    UNROLL for (int s = 0; s < L::slices; ++s) {
      uint b[TILES][2];
      UNROLL for (int t = 0; t < TILES; ++t) read_factor(query, uint((t * L::groups + g) * L::slices + s), lane, b[t]);
      UNROLL for (int u = 0; u < KEY_TILES; ++u) {
        uint a[4];
        UNROLL for (int i = 0; i < 4; ++i)
          a[i] = L::part::template values<L::shift>(keys.low[u][i % 2][g], keys.high[u][i % 2][g], 2 * s + i / 2, table, address);
        UNROLL for (int t = 0; t < TILES; ++t) multiply(sums[u][t], a, b[t]);
      }
    }
    if (last) {
      UNROLL for (int u = 0; u < KEY_TILES; ++u) {
        const uint of_keys = has_scale(L::type) ? keys.scales.pair(u, g, lane) : 0u;
        UNROLL for (int t = 0; t < TILES; ++t)
          UNROLL for (int i = 0; i < 4; ++i) {
            const float scale = has_scale(L::type) ? (i < 2 ? low_half(of_keys) : high_half(of_keys)) * factor[t][i % 2] : factor[t][i % 2];
            const bool is_first = g == 0 || !has_scale(L::type);
            scores[u][t][i] = (is_first ? offset[t][i % 2] : scores[u][t][i]) + sums[u][t][i] * scale;
          }
      }
    }
  }
}

// Sixteen pages' means as if they were keys: row i of the product is page first + i * EVERY, or `last`. stride: values.
// PAGED: page i lies in slots[i].
template <class L, int EVERY, bool PAGED>
inline void load_means(const device half* means, const device int* slots, uint stride, uint first, uint last, uint lane, thread StepKeys<L, 1>& keys) {
  UNROLL for (int e = 0; e < 2; ++e) {
    const uint page = metal::min(first + (row_of(lane) + uint(8 * e)) * uint(EVERY), last);
    const device uchar* row = (const device uchar*)(means + (PAGED ? uint(slots[page]) : page) * stride);
    UNROLL for (int g = 0; g < L::groups; ++g) L::part::load(row, g, pair_of(lane), keys.low[0][e][g], keys.high[0][e][g]);
  }
}

// The running softmax of a simdgroup: sums of weighted values (still as V's codes have them), and for this lane's two
// columns a tile a bound of the scores (as a power of two) and its own part of the sum of weights. A bound that is
// passed is set HEADROOM above the score, so that it seldom is: weights begin at 1/8, far from where f16 ends.
constexpr float HEADROOM = 3.0f;
template <int SLICES, int TILES> struct Running {
  float values[SLICES][TILES][4];
  float maximum[TILES][2];
  float sum[TILES][2];

  inline void clear() {
    UNROLL for (int t = 0; t < TILES; ++t) {
      UNROLL for (int e = 0; e < 2; ++e) {
        maximum[t][e] = -1.0e30f;
        sum[t][e] = 0.0f;
      }
      UNROLL for (int j = 0; j < SLICES; ++j)
        UNROLL for (int i = 0; i < 4; ++i) values[j][t][i] = 0.0f;
    }
  }

  inline void rescale(int t, int e, float new_maximum) {
    const float decay = exp2_fast(maximum[t][e] - new_maximum);
    maximum[t][e] = new_maximum;
    sum[t][e] *= decay;
    UNROLL for (int j = 0; j < SLICES; ++j) {
      values[j][t][e] *= decay;
      values[j][t][e + 2] *= decay;
    }
  }
};

// Over the rows of a result: the maximum and the sum of this lane's column.
inline float column_max(float v) {
  UNROLL for (int i = 0; i < 3; ++i) v = metal::max(v, simd_shuffle_xor(v, ushort(row_mask(i))));
  return v;
}
inline float column_sum(float v) {
  UNROLL for (int i = 0; i < 3; ++i) v += simd_shuffle_xor(v, ushort(row_mask(i)));
  return v;
}

// Take a step's scores and values into the running softmax.
template <class L, int TILES, int KEY_TILES, bool TILED, int SLICES>
inline void take(const thread float (&scores)[KEY_TILES][TILES][4], const thread StepValues<L, KEY_TILES, TILED>& v, SHARED_POINTER(uint) table,
                 uint address, uint lane, thread Running<SLICES, TILES>& running) {
  float top[TILES][2];  // of this lane's scores
  bool moved = false;
  UNROLL for (int t = 0; t < TILES; ++t)
    UNROLL for (int e = 0; e < 2; ++e) {
      float m = metal::max(scores[0][t][e], scores[0][t][e + 2]);
      UNROLL for (int u = 1; u < KEY_TILES; ++u) m = metal::max(m, metal::max(scores[u][t][e], scores[u][t][e + 2]));
      moved = moved || m > running.maximum[t][e];
      top[t][e] = m;
    }
  if (simd_any(moved)) {
    UNROLL for (int t = 0; t < TILES; ++t)
      UNROLL for (int e = 0; e < 2; ++e) {
        const float m = column_max(top[t][e]), before = running.maximum[t][e];
        running.rescale(t, e, m > before ? m + HEADROOM : before);
      }
  }
  UNROLL for (int u = 0; u < KEY_TILES; ++u) {
    uint weights[L::scales][TILES][2];
    UNROLL for (int t = 0; t < TILES; ++t) {
      float p[4];
      UNROLL for (int i = 0; i < 4; ++i) {
        p[i] = exp2_fast(scores[u][t][i] - running.maximum[t][i % 2]);
        running.sum[t][i % 2] += p[i];
      }
      UNROLL for (int g = 0; g < L::scales; ++g)
        UNROLL for (int e = 0; e < 2; ++e) {
          const uint packed = pack_halves(p[2 * e] * scale_factor(L::type), p[2 * e + 1] * scale_factor(L::type));
          weights[g][t][e] = result_to_factor(has_scale(L::type) ? times_half(packed, v.scales.pair(u, g, lane), e) : packed);
        }
    }
    UNROLL for (int g = 0; g < L::groups; ++g)
      UNROLL for (int j = 0; j < L::slices; ++j) {
        uint a[4];
        v.factor(u, g, j, table, address, a);
        UNROLL for (int t = 0; t < TILES; ++t)
          multiply(running.values[g * L::slices + j][t], a, weights[has_scale(L::type) ? g : 0][t]);
      }
  }
}

// Sums of all simdgroups to `out` [8 * TILES, DIM] and `statistics` [8 * TILES, 2] (maximum and sum of each column).
// Goes through `room`, whose readers are done after the first barrier, in as many phases as it needs.
template <class L, int TILES, int SIMDGROUPS, int SLICES, int ROOM>
inline void write_sums(thread Running<SLICES, TILES>& running, SHARED_POINTER(uint) room, SHARED_POINTER(float) maxima, SHARED_POINTER(float) sums,
                       device float* out, device float* statistics, uint lane, uint simdgroup) {
  constexpr int elements = SLICES * TILES * 4;
  constexpr int phases = phases_for(SIMDGROUPS * elements * 32, ROOM);
  constexpr int in_phase = elements / phases;
  static_assert(elements % phases == 0, "a phase takes whole elements");
  UNROLL for (int t = 0; t < TILES; ++t)
    UNROLL for (int e = 0; e < 2; ++e) {
      const float sum = column_sum(running.sum[t][e]);
      if (row_of(lane) == 0u) {
        const uint column = uint(8 * t + e) + 2u * pair_of(lane);
        maxima[simdgroup * uint(8 * TILES) + column] = running.maximum[t][e];
        sums[simdgroup * uint(8 * TILES) + column] = sum;
      }
    }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL for (int t = 0; t < TILES; ++t)
    UNROLL for (int e = 0; e < 2; ++e) {
      const uint column = uint(8 * t + e) + 2u * pair_of(lane);
      float maximum = maxima[column], sum = 0.0f;
      for (int k = 1; k < SIMDGROUPS; ++k) maximum = metal::max(maximum, float(maxima[uint(k * 8 * TILES) + column]));
      for (int k = 0; k < SIMDGROUPS; ++k) sum += sums[uint(k * 8 * TILES) + column] * exp2_fast(maxima[uint(k * 8 * TILES) + column] - maximum);
      running.rescale(t, e, maximum);
      if (simdgroup == 0u && row_of(lane) == 0u) {
        statistics[2u * column] = maximum;
        statistics[2u * column + 1u] = sum;
      }
    }
  UNROLL for (int phase = 0; phase < phases; ++phase) {
    if (phase > 0) threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int j = 0; j < SLICES; ++j)
      UNROLL for (int t = 0; t < TILES; ++t)
        UNROLL for (int i = 0; i < 4; ++i) {
          const int element = (j * TILES + t) * 4 + i;
          if (element / in_phase == phase)
            room[(simdgroup * uint(in_phase) + uint(element % in_phase)) * 32u + lane] = as_type<uint>(running.values[j][t][i]);
        }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint w = simdgroup * 32u + lane; w < uint(in_phase * 32); w += uint(SIMDGROUPS * 32)) {
      const uint element = w / 32u + uint(phase * in_phase), i = element % 4u, t = element / 4u % uint(TILES), slice = element / uint(4 * TILES);
      const uint column = 8u * t + 2u * pair_of(w % 32u) + i % 2u;
      const uint value = uint(L::part::value_of(int(row_of(w % 32u)), int(slice) % L::slices, int(i / 2u)));
      float sum = 0.0f;
      for (int k = 0; k < SIMDGROUPS; ++k) sum += as_type<float>(uint(room[uint(k * in_phase * 32) + w]));
      out[column * uint(L::dim) + slice / uint(L::slices) * uint(L::group) + value] = sum;
    }
  }
}

// A lane's values of one of `n` query columns: i * 32 + lane in x[i]. Zeros for columns after the last.
template <class T, int PER_LANE> inline void load_column(const device T* queries, uint column, uint n, uint lane, thread float (&x)[PER_LANE]) {
  UNROLL for (int i = 0; i < PER_LANE; ++i)
    x[i] = column < n ? float(queries[(column < n ? column : 0u) * uint(32 * PER_LANE) + uint(i) * 32u + lane]) : 0.0f;
}

// One query column into the fragments that `score` reads. x: value i * 32 + lane in x[i], |x| < 2.
template <class L, int PER_LANE> inline void store_query(const thread float* x, SHARED_POINTER(half) query, uint column, uint lane) {
  typedef typename L::part part;
  constexpr uint group = uint(L::slices * 16);
  UNROLL for (int i = 0; i < PER_LANE; ++i) {
    const uint d = uint(i) * 32u + lane, value = d % group;
    const uint k = 2u * part::part_of(value) + part::element_of_value(value), n = column % 8u;
    const uint slice = d / group * uint(L::slices) + part::pair_of_value(value) / 2u, tile = column / 8u * uint(L::groups * L::slices) + slice;
    query[((tile * 32u + lane_of_factor(k, n)) * 2u + part::pair_of_value(value) % 2u) * 2u + element_of_factor(k, n)] = half(x[i]);
  }
}

// The power of two that brings a number into 1 .. 2, exactly; 0 for zero and numbers too small or large to matter.
inline float power_below(float x) {
  const uint exponent = as_type<uint>(x) & 0x7f800000u;
  return exponent == 0u || exponent >= 0x7f000000u ? 0.0f : as_type<float>(exponent);
}

// One over a power of two of `power_below`, exactly; 0 for 0.
inline float inverse_power(float power) { return power > 0.0f ? as_type<float>(0x7f000000u - as_type<uint>(power)) : 0.0f; }

}  // namespace tq
