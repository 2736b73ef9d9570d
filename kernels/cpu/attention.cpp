// Attention of few queries over many keys.
//
// Keys are laid out once per head as the weight of a product, so that scores are tiles of queries
// times blocks of keys; so are values, with the weights of the keys as rows.  All keys of a query
// are weighed before the values are read: no number of a query depends on the others.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>

#include "tiles.h"
#include "vector.h"

namespace {

constexpr int64_t SCORES = 1 << 16;  // held at once, so that they stay in L2

struct Call {
  const void *q, *k, *v, *mask;
  void *out;                 // (R, H, m, d)
  const int64_t *strides;    // of q, k, v: row, head, position; of the mask: row, query
  int64_t heads, m, length, d;
  float scale;
  bool half;
  int64_t bytes() const { return half ? 2 : 4; }
};

// Values (length, d) from column `first` on in groups of inputs, 64 numbers of each, zeros behind.
template <class T>
void lay_out_values(const Call &c, const char *v, int64_t first, char *to) {
  const int64_t stride = c.strides[8] * c.bytes();
  const auto rows = [&](int64_t key, int64_t column) {
    const int64_t left = key < c.length ? c.d - column : 0;
    const char *from = v + key * stride + column * c.bytes();
    if constexpr (T::GROUP == 1)
      return _mm512_maskz_loadu_epi32(left > 0 ? lanes(left) : 0, from);
    else
      return _mm512_cvtepu16_epi32(
          _mm256_maskz_loadu_epi16(left > 0 ? lanes(left) : 0, from));
  };
  for (int64_t key = 0; key < c.length; key += T::GROUP)
    for (int64_t i = 0; i < BLOCK; i += 16, to += 64) {
      __m512i words = rows(key, first + i);
      if constexpr (T::GROUP == 2)
        words = _mm512_or_si512(words, _mm512_slli_epi32(rows(key + 1, first + i), 16));
      _mm512_storeu_si512(to, words);
    }
}

// Scores of a query become weights with the largest 1, as rows of the next product; their sum.
float weigh(const Call &c, const float *scores, const void *mask, int64_t at, char *weights) {
  const __m512 scale = _mm512_set1_ps(c.scale), nothing = _mm512_set1_ps(-INFINITY);
  const auto score = [&](int64_t k) {
    const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(scores + k), scale);
    if (!mask) return _mm512_mask_mov_ps(nothing, lanes(c.length - k), scaled);
    const __m512 added = read_or(mask, c.half, at + k, c.length - k, -INFINITY);
    return _mm512_add_ps(scaled, added);
  };
  __m512 most = nothing, sum = _mm512_setzero_ps();
  for (int64_t k = 0; k < c.length; k += 16) most = _mm512_max_ps(most, score(k));
  const float largest = std::max(_mm512_reduce_max_ps(most), -std::numeric_limits<float>::max());
  const __m512 base = _mm512_set1_ps(largest), floor = _mm512_set1_ps(-87);
  const int64_t all = (c.length + 1) / 2 * 2;
  for (int64_t k = 0; k < c.length; k += 16) {
    const __m512 apart = _mm512_sub_ps(score(k), base);
    const __mmask16 seen = _mm512_cmp_ps_mask(apart, floor, _CMP_NLT_UQ);  // NaN, too
    const __m512 weight = _mm512_maskz_mov_ps(seen, exponential(_mm512_max_ps(floor, apart)));
    sum = _mm512_add_ps(sum, weight);
    write(weights, c.half, k, all - k, weight);
  }
  return _mm512_reduce_add_ps(sum);
}

template <class T>
void head(const Call &c, int64_t row, int64_t head) {
  const int64_t size = c.bytes(), *s = c.strides;
  const char *q = (const char *)c.q + (row * s[0] + head * s[1]) * size;
  const char *k = (const char *)c.k + (row * s[3] + head * s[4]) * size;
  const char *v = (const char *)c.v + (row * s[6] + head * s[7]) * size;
  const int64_t blocks = (c.length + BLOCK - 1) / BLOCK, wide = blocks * BLOCK;
  const int64_t groups = c.d / T::GROUP, pairs = (c.length + T::GROUP - 1) / T::GROUP;
  const int64_t most = std::min(c.m, std::max<int64_t>(ROWS, SCORES / wide / ROWS * ROWS));
  const int64_t outs = (c.d + BLOCK - 1) / BLOCK;
  std::unique_ptr<char[]> memory(new char[wide * groups * 4 + outs * pairs * BLOCK * 4 +
                                          most * wide * (4 + size) + most * 4 + 64]);
  char *keys = memory.get(), *values = keys + wide * groups * 4;
  float *scores = (float *)(values + outs * pairs * BLOCK * 4);
  char *weights = (char *)(scores + most * wide);
  float *sums = (float *)(weights + most * wide * size);
  for (int64_t b = 0; b < blocks; b++)
    lay_out(k, c.length, s[5] * size / 4, b * BLOCK, 0, groups, keys + b * groups * BLOCK * 4);
  for (int64_t o = 0; o < outs; o++)
    lay_out_values<T>(c, v, o * BLOCK, values + o * pairs * BLOCK * 4);
  typename T::Sum tile[ROWS * VECTORS];
  for (int64_t first = 0; first < c.m; first += most) {
    const int64_t count = std::min(most, c.m - first);
    for (int64_t b = 0; b < blocks; b++)
      for (int64_t r = 0; r < count; r += ROWS) {
        const int64_t some = std::min<int64_t>(ROWS, count - r);
        const char *block = keys + b * groups * BLOCK * 4;
        std::fill(tile, tile + ROWS * VECTORS, T::none());
        tile_of<T>(int(some), (const typename T::In *)(q + (first + r) * s[2] * size), s[2], block,
                   groups, tile, block);
        for (int64_t i = 0; i < some; i++)
          for (int64_t n = 0; n < VECTORS; n++)
            _mm512_storeu_ps(scores + (r + i) * wide + b * BLOCK + 16 * n, tile[i * VECTORS + n]);
      }
    for (int64_t r = 0; r < count; r++)
      sums[r] = weigh(c, scores + r * wide, c.mask, row * s[9] + (first + r) * s[10],
                      weights + r * wide * size);
    for (int64_t r = 0; r < count; r += ROWS)
      for (int64_t o = 0; o < outs; o++) {
        const int64_t some = std::min<int64_t>(ROWS, count - r);
        const char *block = values + o * pairs * BLOCK * 4;
        std::fill(tile, tile + ROWS * VECTORS, T::none());
        tile_of<T>(int(some), (const typename T::In *)(weights + r * wide * size), wide, block,
                   pairs, tile, block);
        for (int64_t i = 0; i < some; i++) {
          const int64_t at = ((row * c.heads + head) * c.m + first + r + i) * c.d + o * BLOCK;
          const __m512 share = _mm512_set1_ps(sums[r + i] == 0 ? 0 : 1 / sums[r + i]);
          for (int64_t n = 0; n < VECTORS && o * BLOCK + 16 * n < c.d; n++)
            write(c.out, c.half, at + 16 * n, c.d - o * BLOCK - 16 * n,
                  _mm512_mul_ps(tile[i * VECTORS + n], share));
        }
      }
  }
}

}  // namespace

extern "C" {

// out (R, H, m, d) = softmax(q k' scale + mask) v for q (R, H, m, d), k and v (R, H, length, d), and
// a mask (R, m, length) or nullptr; all float32 or, where `half`, bfloat16.  `strides`, in numbers:
// of rows, heads and positions of q, k and v, and of rows and queries of the mask.
void dllm_attention(const void *q, const void *k, const void *v, const void *mask, void *out,
                    const int64_t *strides, int64_t rows, int64_t heads, int64_t m, int64_t length,
                    int64_t d, double scale, int half, int threads) {
  const Call call{q, k, v, mask, out, strides, heads, m, length, d, float(scale), bool(half)};
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic)
  for (int64_t i = 0; i < rows * heads; i++)
    half ? head<Bfloat16>(call, i / heads, i % heads) : head<Float32>(call, i / heads, i % heads);
}

}  // extern "C"
