// A softmax over keys in parts: four channels of the weighted sum, its weights' sum, and the largest score so far, in log2.
namespace tq {

struct PartSum {
  float x[4], sum, maximum;
};

// Adds a part by its answer (four channels of T, 8 bytes from an aligned address) and its natural log-sum-exp.
template <class T> inline void add_part(thread PartSum& all, const device T* answer, float log_sum) {
  const float of_part = log_sum * 1.4426950408889634f, maximum = metal::max(all.maximum, of_part);
  const float before = exp2_fast(all.maximum - maximum), weight = exp2_fast(of_part - maximum);
  const uint2 words = *(const device uint2*)answer;
  const uint halves[4] = {words.x & 0xffffu, words.x >> 16, words.y & 0xffffu, words.y >> 16};
  UNROLL for (int i = 0; i < 4; ++i) all.x[i] = all.x[i] * before + weight * float(as_type<T>(ushort(halves[i])));
  all.sum = all.sum * before + weight;
  all.maximum = maximum;
}

}  // namespace tq
