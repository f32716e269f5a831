// Matrices of ggml's blocks as they lie on a GPU: a permutation of the file's bits (arrange_matrix.metal makes it), so that a
// lane's codes of 64 columns are 16 bytes and a simdgroup's are one run of memory.
//
// A step is 16 rows by 64 columns. Place 4 * g + t of a step has rows g and g + 8, and of each run of 16 columns those from 4 * t
// on: eight codes, in the order of the registers of a matrix fragment, each register's two codes in the halves of a word, or side by
// side where they are looked up together. Planes lie behind each other, each step after step, tile after tile: nibbles, the high nibbles of bytes, codes of two bits, of one bit, scales.
namespace tq {

// The types that are read, by ggml's numbers.
enum Weights : int { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14, IQ4_NL = 20, IQ4_XS = 23, MXFP4 = 39 };

constexpr bool is_k_type(int type) { return type >= Q2_K && type <= Q6_K; }
constexpr int nibbles_of(int type) { return type == Q8_0 ? 2 : type == Q2_K || type == Q3_K ? 0 : 1; }  // planes of them
constexpr bool has_twos(int type) { return type == Q2_K || type == Q3_K || type == Q6_K; }
constexpr bool has_ones(int type) { return type == Q5_0 || type == Q5_1 || type == Q5_K || type == Q3_K; }
constexpr bool has_values(int type) { return type == IQ4_NL || type == IQ4_XS || type == MXFP4; }  // codes stand for numbers of a table
constexpr bool has_minimum(int type) { return type == Q4_1 || type == Q5_1 || type == Q2_K || type == Q4_K || type == Q5_K; }
// What is subtracted from a code; of Q8_0 from the high nibble.
constexpr int zero_of(int type) { return type == Q4_0 || type == Q8_0 ? 8 : type == Q5_0 ? 16 : type == Q6_K ? 32 : type == Q3_K ? 4 : 0; }
constexpr int runs_of_group(int type) { return type == Q2_K || type == Q3_K || type == Q6_K ? 1 : 2; }  // of 16 columns with one scale
constexpr int steps_of_block(int type) { return is_k_type(type) || type == IQ4_XS ? 4 : 1; }  // that share a block's scales

// Words of a step in the planes of codes, which scales come after.
constexpr int low_words(int type) { return 128 * nibbles_of(type); }
constexpr int twos_words(int type) { return has_twos(type) ? 64 : 0; }
constexpr int code_words(int type) { return low_words(type) + twos_words(type) + (has_ones(type) ? 32 : 0); }
// Words of a block's scales (a step's, or four), and of the second plane of them.
constexpr int scale_words(int type) {
  return type == IQ4_XS ? 32 : type == MXFP4 ? 8 : type == Q3_K ? 48 : is_k_type(type) ? 64 : type == Q4_1 || type == Q5_1 ? 32 : 16;
}

// Numbers of a table's codes, four to a word.
inline int table_number(int type, uint code) {
  const uint iq4[4] = {0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u}, fp4[4] = {0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu};
  const uint word = type == MXFP4 ? fp4[code >> 2] : iq4[code >> 2];
  const uint byte = word >> (8u * (code & 3u)) & 0xffu;
  return int(byte) - (byte & 0x80u ? 256 : 0);
}

// Bits moved up by `by`, or down by -by.
inline uint moved(uint word, int by) { return by >= 0 ? word << (by >= 0 ? by : 0) : word >> (by >= 0 ? 0 : -by); }
inline uint word_of(uint4 words, int i) { return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w; }

// A place's codes of a step.
struct Codes {
  uint4 low, high;
  uint2 twos;
  uint ones;
};

// Where a place's codes of a step lie. n_all: steps of the whole matrix, step: counted through all of it.
template <int TYPE> struct CodePlaces {
  const device uint4* low;
  const device uint4* high;
  const device uint2* twos;
  const device uint* ones;

  void start(const device uint* planes, uint n_all, uint step, uint place) {
    const ulong at = ulong(step) * 32ul + ulong(place);
    const device uint* rest = planes + ulong(n_all) * ulong(low_words(TYPE));
    low = (const device uint4*)planes + at;
    high = low + ulong(n_all) * 32ul;
    twos = (const device uint2*)rest + at;
    ones = rest + ulong(n_all) * ulong(twos_words(TYPE)) + at;
  }

  // Of a step `later` steps on.
  void load(int later, thread Codes& codes) const {
    if (nibbles_of(TYPE) > 0) codes.low = read_once(low + later * 32);
    if (nibbles_of(TYPE) > 1) codes.high = read_once(high + later * 32);
    if (has_twos(TYPE)) codes.twos = read_once(twos + later * 32);
    if (has_ones(TYPE)) codes.ones = read_once(ones + later * 32);
  }
};

// The two codes of register i of run j, each in a half of a word under the bits of `over`.
template <int TYPE> inline uint code_pair(thread const Codes& codes, int j, int i, uint over) {
  constexpr int twos_at = nibbles_of(TYPE) ? 4 : 0, ones_at = twos_at + (has_twos(TYPE) ? 2 : 0);
  uint pair = over;
  if (nibbles_of(TYPE) > 0) pair = bits_under(word_of(codes.low, j) >> (4 * i), 0x000f000fu, pair);
  if (has_twos(TYPE)) pair = bits_under(moved(j < 2 ? codes.twos.x : codes.twos.y, twos_at - 2 * (4 * (j & 1) + i)), 0x00030003u << twos_at, pair);
  if (has_ones(TYPE)) pair = bits_under(moved(codes.ones, ones_at - (4 * j + i)), 0x00010001u << ones_at, pair);
  return pair;
}
inline uint high_pair(thread const Codes& codes, int j, int i, uint over) { return bits_under(word_of(codes.high, j) >> (4 * i), 0x000f000fu, over); }
// Both codes of types with a table, side by side in a byte.
inline uint pair_in_table(thread const Codes& codes, int j, int i) { return word_of(codes.low, j) >> (8 * i) & 0xffu; }

constexpr uint UP = 0x4b000000u;
// Numbers of 6 bits under `up`: five in a word, the sixteenth in the upper two bits of three words.
inline uint six_bits(uint a, uint b, uint c, int i, uint up) {
  if (i == 15) return up | a >> 30 | (b >> 28 & 12u) | (c >> 26 & 48u);
  return bits_under((i < 5 ? a : i < 10 ? b : c) >> (6 * (i % 5)), 63u, up);
}
// A number less `less`, times a factor of f16, rounded once. number: as the last bits of the f32 2 ** 23, which is UP.
inline float scaled(uint number, uint less, float factor) {
  const float moved_up = as_type<float>(number);
  if (less == 0u) return multiply_add(moved_up, factor, times(-8388608.0f, factor));
  return times(moved_up - (8388608.0f + float(less)), factor);
}

// A place's scales of a block: of rows g and g + 8.
struct BlockScales {
  uint4 rows[2];
  uint d[2];
};

// block: counted through the matrix.
template <int TYPE> inline void load_scales(const device uint* planes, uint n_all, uint block, uint g, thread BlockScales& scales) {
  const device uint* all = planes + ulong(n_all) * ulong(code_words(TYPE));
  const device uint* mine = all + ulong(block) * ulong(scale_words(TYPE));
  const device uint* second = all + ulong(n_all / uint(steps_of_block(TYPE))) * ulong(scale_words(TYPE));
  if (TYPE == MXFP4) {
    scales.d[0] = mine[g];
  } else if (TYPE == IQ4_XS || TYPE == Q4_1 || TYPE == Q5_1) {
    scales.rows[0] = ((const device uint4*)mine)[g];
  } else if (TYPE == Q3_K) {
    const device uint2* words = (const device uint2*)mine + 3u * g;
    const uint2 a = words[0], b = words[1], c = words[2];
    scales.rows[0].x = a.x;
    scales.rows[0].y = a.y;
    scales.rows[0].z = b.x;
    scales.rows[1].x = b.y;
    scales.rows[1].y = c.x;
    scales.rows[1].z = c.y;
  } else if (is_k_type(TYPE)) {
    UNROLL for (int h = 0; h < 2; ++h) scales.rows[h] = ((const device uint4*)mine)[g + 8u * uint(h)];
  } else {
    const uint2 two = ((const device uint2*)mine)[g];
    scales.d[0] = two.x;
    scales.d[1] = two.y;
  }
  if (TYPE == Q2_K) {
    const uint2 two = ((const device uint2*)second)[block * 8u + g];
    scales.d[0] = two.x;
    scales.d[1] = two.y;
  }
  if (TYPE == Q3_K || TYPE == Q6_K) scales.d[0] = second[block * 8u + g];
}

// What a place has of STEPS steps of TILES tiles.
template <int TYPE, int TILES, int STEPS> struct Unit {
  Codes codes[TILES][STEPS];
  BlockScales scales[TILES][STEPS / steps_of_block(TYPE)];

  void load(const device uint* planes, uint n_tiles, uint n_steps, uint tile, uint in_row, uint place) {
    UNROLL for (int i = 0; i < TILES; ++i) {
      const uint step = metal::min(tile + uint(i), n_tiles - 1u) * n_steps + in_row, block = step / uint(steps_of_block(TYPE));
      CodePlaces<TYPE> places;
      places.start(planes, n_tiles * n_steps, step, place);
      UNROLL for (int s = 0; s < STEPS; ++s) places.load(s, codes[i][s]);
      UNROLL for (int b = 0; b < STEPS / steps_of_block(TYPE); ++b)
        load_scales<TYPE>(planes, n_tiles * n_steps, block + uint(b), place >> 2, scales[i][b]);
    }
  }
};

// Row h's (g or g + 8) scale and minimum in run j of a block's step: weights are scale * (code - zero) + minimum.
// up: UP, best in a register.
template <int TYPE> inline void scale_of(thread const BlockScales& scales, int step, int j, int h, uint up, thread float& scale, thread float& minimum) {
  const int group = (4 * step + j) / runs_of_group(TYPE);
  minimum = 0.0f;
  if (TYPE == Q4_K || TYPE == Q5_K) {
    const uint4 row = scales.rows[h];
    scale = scaled(six_bits(row.y, row.z, row.w, group, up), 0u, low_half(row.x));
    minimum = scaled(six_bits(row.y, row.z, row.w, 8 + group, up), 0u, -high_half(row.x));
  } else if (TYPE == Q6_K || TYPE == Q2_K) {
    const uint word = word_of(scales.rows[h], group / 4);
    if (TYPE == Q6_K) scale = scaled(byte_under(word, group % 4, up), 128u, h ? high_half(scales.d[0]) : low_half(scales.d[0]));
    if (TYPE == Q2_K) {
      scale = scaled(bits_under(word >> (8 * (group % 4)), 15u, up), 0u, low_half(scales.d[h]));
      minimum = scaled(bits_under(word >> (8 * (group % 4) + 4), 15u, up), 0u, -high_half(scales.d[h]));
    }
  } else if (TYPE == Q3_K) {
    const uint4 row = scales.rows[h];
    scale = scaled(six_bits(row.x, row.y, row.z, group, up), 32u, h ? high_half(scales.d[0]) : low_half(scales.d[0]));
  } else if (TYPE == IQ4_XS) {
    const uint first = h ? scales.rows[0].z : scales.rows[0].x, low = h ? scales.rows[0].w : scales.rows[0].y;
    scale = scaled(up | (low >> (4 * group) & 15u) | (moved(first, -12 - 2 * group) & 48u), 32u, low_half(first));
  } else if (TYPE == MXFP4) {
    const uint exponent = scales.d[0] >> (16 * h + 8 * (group & 1)) & 0xffu;
    scale = as_type<float>(exponent < 2u ? 0x00200000u << exponent : (exponent - 1u) << 23);
  } else {
    uint word = scales.d[h];
    if (has_minimum(TYPE)) {
      word = h ? scales.rows[0].z : scales.rows[0].x;
      const uint minima = h ? scales.rows[0].w : scales.rows[0].y;
      minimum = (group & 1) ? high_half(minima) : low_half(minima);
    }
    scale = (group & 1) ? high_half(word) : low_half(word);
  }
}

}  // namespace tq
