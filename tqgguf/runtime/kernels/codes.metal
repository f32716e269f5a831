// How codes of every type are read: groups of values with one scale, parts of groups that a lane takes, pairs of values.
namespace tq {

// The types that kernels read. Python's numbers for them: kernels/types.py.
enum Type : int { F16 = 0, TURBO2 = 2, TURBO3 = 3, TURBO4 = 4, Q8_0 = 8, Q4_0 = 40 };

constexpr int low_bits(int type) { return type == TURBO2 || type == TURBO3 ? 2 : type == TURBO4 || type == Q4_0 ? 4 : type == Q8_0 ? 8 : 16; }
constexpr int high_bits(int type) { return type == TURBO3 ? 1 : 0; }
constexpr bool has_scale(int type) { return type != F16; }
constexpr bool has_table(int type) { return low_bits(type) <= 4; }
constexpr int table_entries(int type) { return has_table(type) ? 1 << 2 * (low_bits(type) + high_bits(type)) : 0; }
// ggml's types are read as value / 16, so that weights times their small scales stay normal f16 numbers.
constexpr float scale_factor(int type) { return type == Q8_0 || type == Q4_0 ? 16.0f : 1.0f; }

constexpr int log2_of(int n) { return n <= 1 ? 0 : 1 + log2_of(n / 2); }
constexpr int larger(int a, int b) { return a > b ? a : b; }
// Into how many phases `words` go through `room`.
constexpr int phases_for(int words, int room) { return words <= room ? 1 : 2 * phases_for((words + 1) / 2, room); }
constexpr int words_of(int bytes) { return (bytes + 3) / 4; }
// The largest power of two up to 16 that divides all sizes of which `sizes` is the bitwise or.
constexpr int alignment_of(int sizes) { return (sizes | 16) & -(sizes | 16); }

// BYTES bytes from an address aligned to ALIGNMENT, as words; the rest of the last word is zero.
template <int BYTES, int ALIGNMENT> inline void load_bytes(const device uchar* p, thread uint* words) {
  if (ALIGNMENT >= 16 && BYTES % 16 == 0) {
    UNROLL for (int i = 0; i < BYTES / 16; ++i) {
      const uint4 four = ((const device uint4*)p)[i];
      words[4 * i] = four.x;
      words[4 * i + 1] = four.y;
      words[4 * i + 2] = four.z;
      words[4 * i + 3] = four.w;
    }
  } else if (ALIGNMENT >= 8 && BYTES % 8 == 0) {
    UNROLL for (int i = 0; i < BYTES / 8; ++i) {
      const uint2 two = ((const device uint2*)p)[i];
      words[2 * i] = two.x;
      words[2 * i + 1] = two.y;
    }
  } else if (ALIGNMENT >= 4 && BYTES % 4 == 0) {
    UNROLL for (int i = 0; i < BYTES / 4; ++i) words[i] = ((const device uint*)p)[i];
  } else if (ALIGNMENT >= 2 && BYTES % 2 == 0) {
    UNROLL for (int i = 0; i < BYTES / 2; ++i) {
      const uint half_word = uint(((const device ushort*)p)[i]);
      words[i / 2] = i % 2 ? words[i / 2] | (half_word << 16) : half_word;
    }
  } else {
    UNROLL for (int i = 0; i < BYTES; ++i) {
      const uint byte = uint(p[i]);
      words[i / 4] = i % 4 ? words[i / 4] | (byte << (8 * (i % 4))) : byte;
    }
  }
}

// Bits from .. from + width - 1 of a word, moved to bit `to`.
inline uint field(uint word, int from, int width, int to) {
  const uint moved = from >= to ? word >> (from >= to ? from - to : 0) : word << (from >= to ? 0 : to - from);
  return moved & (((1u << width) - 1u) << to);
}

// What a table of pairs of values has for WIDTH bits of a word. Entries lie 1 << SHIFT bytes apart; or, with ROW_SHIFT, one
// byte of the word makes an address, and the table has an entry for whatever is in the byte beside those bits.
constexpr int ROW_SHIFT = 8, ROW_WORDS = 64, ROW_COPIES = 32;
template <int WIDTH, int SHIFT> inline uint look_up(uint word, int from, SHARED_POINTER(uint) table, uint address) {
  if (SHIFT == ROW_SHIFT) return table_read_row(table, word >> (from % 8), from / 8, address);
  return table_read(table, field(word, from, WIDTH, SHIFT) | address);
}

// One lane's part of a group: GROUP / PARTS values of one row, read as pairs.
template <int TYPE, int DIM, int GROUP, int PARTS> struct Part {
  enum : int {
    groups = DIM / GROUP,
    pairs = GROUP / PARTS / 2,
    low = GROUP * low_bits(TYPE) / 8,
    group_bytes = low + GROUP * high_bits(TYPE) / 8,
    row_bytes = groups * group_bytes,
    low_part = low / PARTS,
    low_words = words_of(low_part),
    high_part_bits = GROUP / PARTS * high_bits(TYPE),
    high_part = (high_part_bits + 7) / 8,  // not whole bytes for a part of 12 values: then the lane shifts
    high_words = high_bits(TYPE) ? larger((pairs + 7) / 8, words_of(high_part)) : 1
  };

  static inline void load(const device uchar* row, int group, uint part, thread uint* low_codes, thread uint* high_codes) {
    const device uchar* p = row + group * group_bytes;
    load_bytes<low_part, alignment_of(row_bytes | group_bytes | low_part)>(p + part * uint(low_part), low_codes);
    if (high_bits(TYPE)) {
      if (high_part_bits % 8 == 0) {
        load_bytes<high_part, alignment_of(row_bytes | group_bytes | low | high_part)>(p + low + part * uint(high_part), high_codes);
      } else {
        const uint bit = part * uint(high_part_bits);
        load_bytes<high_part, 1>(p + low + bit / 8u, high_codes);
        high_codes[0] >>= bit % 8u;
      }
      join_high(low_codes, high_codes);
    }
  }

  // Codes of 2 + 1 bits: even pairs as bytes of `low`, odd ones as bytes of `high`, six bits each with the high two on top.
  static inline void join_high(thread uint* low_codes, thread uint* high_codes) {
    constexpr int words = (pairs + 7) / 8;
    UNROLL for (int w = words - 1; w >= 0; --w) {  // backwards: 16 bits of `high` become a word
      const uint twice = double_bytes((high_codes[w / 2] >> (16 * (w % 2))) & 0xffffu);
      const uint even = ((twice << 4) & 0x00ff00ffu) | (twice & 0xff00ff00u), odd = ((twice << 2) & 0x00ff00ffu) | ((twice >> 2) & 0xff00ff00u);
      high_codes[w] = ((low_codes[w] >> 4) & 0x0f0f0f0fu) | (odd & 0xf0f0f0f0u);
      low_codes[w] = (low_codes[w] & 0x0f0f0f0fu) | (even & 0xf0f0f0f0u);
    }
  }

  // Pair i as two f16 in a word. `table`: pairs of values by pairs of codes, entries 1 << shift bytes apart.
  template <int shift> static inline uint values(const thread uint* low_codes, const thread uint* high_codes, int i, SHARED_POINTER(uint) table, uint address) {
    if (TYPE == F16) return low_codes[i];
    if (TYPE == Q8_0) return sixteenths(low_codes[i / 2], i % 2);
    constexpr int width = 2 * low_bits(TYPE);
    if (high_bits(TYPE)) return look_up<width + 2, shift>(i % 2 ? high_codes[i / 8] : low_codes[i / 8], i % 8 / 2 * 8, table, address);
    return look_up<width, shift>(low_codes[i * width / 32], i * width % 32, table, address);
  }

  // Which value of the group element e of pair i is. A byte of q4_0 holds values j and j + 16.
  static constexpr int value_of(int part, int i, int e) {
    return TYPE == Q4_0 ? part * low_part + i + 16 * e : part * (GROUP / PARTS) + 2 * i + e;
  }
  static constexpr uint part_of(uint value) { return TYPE == Q4_0 ? value % 16u / uint(low_part) : value / uint(GROUP / PARTS); }
  static constexpr uint pair_of_value(uint value) { return TYPE == Q4_0 ? value % uint(low_part) : value % uint(GROUP / PARTS) / 2u; }
  static constexpr uint element_of_value(uint value) { return TYPE == Q4_0 ? value / 16u : value % 2u; }
};

// V's codes in tiles of 16 tokens, as lanes read them: lane (row, pair), at slot 4 * row + pair, has GROUP / 8 values, those
// from row * GROUP / 8 on, of tokens 4 * pair .. + 3. Its words lie together with the other lanes', four at a time, then two,
// then one. They hold pairs of codes as entries of a table of values: pair 4 * j + 2 * f + d is value 2 * j + d of tokens
// 2 * f and 2 * f + 1. Six bits go into a byte; of sixteen pairs in three words, the last four are in the two highest bits of
// the others' bytes, two bits in each word.
template <int TYPE, int DIM, int GROUP> struct Tile {
  enum : int {
    bits = low_bits(TYPE) + high_bits(TYPE),
    width = 2 * bits,
    groups = DIM / GROUP,
    words = GROUP * bits / 64,     // of a lane and group
    group_words = 32 * words,      // of a tile
    tile_bytes = 4 * groups * group_words,
    fours = words / 4 * 4,
    spacing = width == 6 ? 8 : width,
    per_word = 32 / spacing        // whole pairs
  };

  // Where word w of a slot lies in its group.
  static constexpr uint place(uint slot, uint w) {
    return w < uint(fours) ? w / 4u * 128u + slot * 4u + w % 4u
           : words % 4 >= 2 && w < uint(fours) + 2u ? uint(fours * 32) + slot * 2u + w - uint(fours) : uint((words - 1) * 32) + slot;
  }
  static inline void load(const device uchar* tile, int group, uint slot, thread uint* w) {
    const device uint* p = (const device uint*)tile + group * group_words;
    UNROLL for (int i = 0; i < fours; i += 4) load_bytes<16, 16>((const device uchar*)(p + place(slot, uint(i))), w + i);
    if (words % 4 >= 2) load_bytes<8, 8>((const device uchar*)(p + place(slot, uint(fours))), w + fours);
    if (words % 2) w[words - 1] = p[place(slot, uint(words - 1))];
  }
  // Pair i of a lane's words.
  template <int shift> static inline uint values(const thread uint* w, int i, SHARED_POINTER(uint) table, uint address) {
    if (width != 6) return look_up<width, shift>(w[i / per_word], i % per_word * width, table, address);
    const int first = i / 16 * 3;
    if (i % 16 < 12) return look_up<6, shift>(w[first + i % 16 / 4], i % 4 * 8, table, address);
    return look_up<6, shift>(last_four(w + first), i % 4 * 8, table, address);
  }
  // Of three words, whose bytes have six bits each: what their two highest bits make.
  static inline uint last_four(const thread uint* w) {
    return ((w[0] >> 6) & 0x03030303u) | ((w[words > 2 ? 1 : 0] >> 4) & 0x0c0c0c0cu) | ((w[words > 2 ? 2 : 0] >> 2) & 0x30303030u);
  }
};

// The entry of a table that stands for two codes.
template <int TYPE> inline uint entry_of_codes(uint first, uint second) {
  const uint bits = uint(low_bits(TYPE)), mask = (1u << bits) - 1u;
  uint entry = (first & mask) | ((second & mask) << bits);
  if (high_bits(TYPE)) entry |= ((first >> bits) << (2u * bits)) | ((second >> bits) << (2u * bits + 1u));
  return entry;
}

// The codes of the pair that entry `entry` of a table stands for; element 0 or 1.
template <int TYPE> inline uint code_of_entry(uint entry, int element) {
  const uint bits = uint(low_bits(TYPE));
  uint code = (entry >> (element ? bits : 0u)) & ((1u << bits) - 1u);
  if (high_bits(TYPE)) code |= ((entry >> (2u * bits + uint(element))) & 1u) << bits;
  return code;
}

// Fill a table of f16 pairs with COPIES of each entry, so that lanes can read from banks of their own.
// book: the value of every code, 16 of them.
template <int TYPE, int COPIES, int THREADS> inline void fill_table(SHARED_POINTER(uint) table, const device float* book, uint thread_index) {
  for (uint i = thread_index; i < uint(table_entries(TYPE) * COPIES / 4); i += uint(THREADS)) {
    const uint entry = i / uint(COPIES / 4);
    fill_four(table, 4u * i, pack_halves(book[code_of_entry<TYPE>(entry, 0)], book[code_of_entry<TYPE>(entry, 1)]));
  }
}

// The same for ROW_SHIFT, in two parts, so that a book can be on its way meanwhile: a thread has one row, or some.
template <int TYPE, int THREADS> struct TableRows {
  enum : int { rows = larger(256 / THREADS, 1) };
  float values[rows][2];

  inline void load(const device float* book, uint thread_index) {
    UNROLL for (int i = 0; i < rows; ++i)
      UNROLL for (int e = 0; e < 2; ++e) values[i][e] = book[code_of_entry<TYPE>((thread_index + uint(i * THREADS)) % uint(table_entries(TYPE)), e)];
  }
  inline void store(SHARED_POINTER(uint) table, uint thread_index) const {
    UNROLL for (int i = 0; i < rows; ++i) {
      const uint row = thread_index + uint(i * THREADS), word = pack_halves(values[i][0], values[i][1]);
      if (row < 256u) {
        UNROLL for (uint k = 0; k < uint(ROW_COPIES / 4); ++k)  // each lane begins in banks of its own
          fill_four(table, row * uint(ROW_WORDS) + (k + thread_index) % uint(ROW_COPIES / 4) * 4u, word);
      }
    }
  }
};

}  // namespace tq
