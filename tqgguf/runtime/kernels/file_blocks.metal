// ggml's blocks of weights as they lie in a file: their codes, and the words of scales that matrix_fields.metal has for them.
namespace tq {

constexpr int values_of_block(int type) { return steps_of_block(type) > 1 ? 256 : 32; }
constexpr int bytes_of_block(int type) {
  return type == Q4_0 || type == IQ4_NL ? 18 : type == Q4_1 ? 20 : type == Q5_0 ? 22 : type == Q5_1 ? 24 : type == Q8_0 ? 34 : type == MXFP4 ? 17
      : type == Q2_K ? 84 : type == Q3_K ? 110 : type == Q4_K ? 144 : type == Q5_K ? 176 : type == Q6_K ? 210 : 136;
}
constexpr int second_words(int type) { return type == Q2_K ? 16 : type == Q3_K || type == Q6_K ? 8 : 0; }

inline uint half_at(const device uchar* p) { return uint(p[0]) | uint(p[1]) << 8; }

// The code of a block's value k, a number from 0 on.
template <int TYPE> inline uint code_of(const device uchar* block, uint k) {
  if (TYPE == Q8_0) return uint(block[2u + k]) ^ 0x80u;
  if (TYPE == Q4_K || TYPE == Q5_K) {
    const uint at = k / 64u * 32u + k % 32u, low = uint(block[(TYPE == Q4_K ? 16u : 48u) + at]) >> (k % 64u / 32u * 4u) & 15u;
    return TYPE == Q4_K ? low : low | (uint(block[16u + k % 32u]) >> (k / 32u) & 1u) << 4;
  }
  if (TYPE == Q6_K) {
    const uint l = k % 32u, quarter = k % 128u / 32u;
    const uint low = uint(block[k / 128u * 64u + quarter % 2u * 32u + l]) >> (quarter / 2u * 4u) & 15u;
    return low | (uint(block[128u + k / 128u * 32u + l]) >> (2u * quarter) & 3u) << 4;
  }
  if (TYPE == Q2_K || TYPE == Q3_K) {
    const uint low = uint(block[(TYPE == Q2_K ? 16u : 32u) + k / 128u * 32u + k % 32u]) >> (k % 128u / 32u * 2u) & 3u;
    return TYPE == Q2_K ? low : low | (uint(block[k % 32u]) >> (k / 32u) & 1u) << 2;
  }
  if (TYPE == IQ4_XS) return uint(block[8u + k / 32u * 16u + k % 16u]) >> (k % 32u / 16u * 4u) & 15u;
  const uint before = TYPE == MXFP4 ? 1u : TYPE == Q4_1 ? 4u : TYPE == Q5_0 ? 6u : TYPE == Q5_1 ? 8u : 2u;
  const uint low = uint(block[before + k % 16u]) >> (k / 16u * 4u) & 15u;
  if (TYPE == Q5_0 || TYPE == Q5_1) return low | (uint(block[before - 4u + k / 8u]) >> (k % 8u) & 1u) << 4;
  return low;
}

// Number i of the 6 bits' numbers of a block: of Q4_K and Q5_K eight scales, then eight minima; of Q3_K sixteen scales.
template <int TYPE> inline uint six_bits_at(const device uchar* block, uint i) {
  if (TYPE == Q3_K) {
    const uint low = i < 8u ? uint(block[96u + i]) & 15u : uint(block[88u + i]) >> 4;
    return low | (uint(block[104u + i % 4u]) >> (i / 4u * 2u) & 3u) << 4;
  }
  const device uchar* packed = block + 4;
  const uint minimum = i / 8u, j = i % 8u;
  if (j < 4u) return uint(packed[j + 4u * minimum]) & 63u;
  const uint low = uint(packed[j + 4u]) >> (4u * minimum) & 15u;
  return low | (uint(packed[j - 4u + 4u * minimum]) >> 6) << 4;
}
template <int TYPE> inline uint six_bits_word(const device uchar* block, uint word) {
  uint found = (six_bits_at<TYPE>(block, 15u) >> (2u * word) & 3u) << 30;
  for (uint i = 0u; i < 5u; ++i) found |= six_bits_at<TYPE>(block, 5u * word + i) << (6u * i);
  return found;
}

// Whose scales a word of a block's holds: a row of the tile.
template <int TYPE> inline uint row_of_scale(uint word) {
  if (TYPE == MXFP4) return word;  // and eight rows on, in the upper half
  if (TYPE == IQ4_XS || TYPE == Q4_1 || TYPE == Q5_1) return word / 4u + 8u * (word / 2u % 2u);
  if (TYPE == Q3_K) return word / 6u + 8u * (word / 3u % 2u);
  if (is_k_type(TYPE)) return word / 4u;
  return word / 2u + 8u * (word % 2u);
}
// Its bits, of that row. block: the first of the row in the step.
template <int TYPE> inline uint scale_word(const device uchar* block, uint word) {
  constexpr uint bytes = uint(bytes_of_block(TYPE));
  if (TYPE == MXFP4) return uint(block[0]) | uint(block[bytes]) << 8;
  if (TYPE == IQ4_XS) return word % 2u ? half_at(block + 4) | half_at(block + 6) << 16 : half_at(block) | half_at(block + 2) << 16;
  if (TYPE == Q3_K) return six_bits_word<TYPE>(block, word % 3u);
  if (TYPE == Q4_K || TYPE == Q5_K)
    return word % 4u ? six_bits_word<TYPE>(block, word % 4u - 1u) : half_at(block) | half_at(block + 2) << 16;
  if (TYPE == Q6_K || TYPE == Q2_K) {
    const device uchar* four = block + (TYPE == Q6_K ? 192u : 0u) + word % 4u * 4u;
    const uint found = half_at(four) | half_at(four + 2) << 16;
    return TYPE == Q6_K ? found ^ 0x80808080u : found;
  }
  const uint at = (TYPE == Q4_1 || TYPE == Q5_1) ? word % 2u * 2u : 0u;
  return half_at(block + at) | half_at(block + bytes + at) << 16;
}

}  // namespace tq
