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
  const uint16_t *q, *k, *v, *mask;
  uint16_t *out;           // (R, H, m, d)
  const int64_t *strides;  // of q, k, v: row, head, position; of the mask: row, query
  int64_t heads, m, length, d;
  float scale;
};

// Values (length, d) from column `first` on, pairs of keys together, 64 numbers of each, zeros behind.
void lay_out_values(const Call &c, const uint16_t *v, int64_t first, char *to) {
  const auto row = [&](int64_t key, int64_t column) {
    const int64_t left = key < c.length ? c.d - column : 0;
    const uint16_t *from = v + key * c.strides[8] + column;
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(left > 0 ? lanes(left) : 0, from));
  };
  for (int64_t key = 0; key < c.length; key += 2)
    for (int64_t i = first; i < first + BLOCK; i += 16, to += 64)
      _mm512_storeu_si512(
          to, _mm512_or_si512(row(key, i), _mm512_slli_epi32(row(key + 1, i), 16)));
}

// Scores of a query become weights with the largest 1, as rows of the next product; their sum.
float weigh(const Call &c, const float *scores, const uint16_t *mask, uint16_t *weights) {
  const __m512 scale = _mm512_set1_ps(c.scale), nothing = _mm512_set1_ps(-INFINITY);
  const auto score = [&](int64_t k) {
    const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(scores + k), scale);
    if (!mask) return _mm512_mask_mov_ps(nothing, lanes(c.length - k), scaled);
    return _mm512_add_ps(scaled, read_or(mask, true, k, c.length - k, -INFINITY));
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
    write(weights, true, k, all - k, weight);
  }
  return _mm512_reduce_add_ps(sum);
}

// Queries from `first` to `last` of a head.
void attend(const Call &c, int64_t row, int64_t head, int64_t first, int64_t last) {
  const int64_t *s = c.strides;
  const uint16_t *q = c.q + row * s[0] + head * s[1], *k = c.k + row * s[3] + head * s[4];
  const uint16_t *v = c.v + row * s[6] + head * s[7];
  const int64_t blocks = (c.length + BLOCK - 1) / BLOCK, wide = blocks * BLOCK;
  const int64_t outs = (c.d + BLOCK - 1) / BLOCK, pairs = (c.length + 1) / 2;
  const int64_t most =
      std::min(last - first, std::max<int64_t>(ROWS, SCORES / wide / ROWS * ROWS));
  const int64_t of_keys = BLOCK * c.d * 2, of_values = pairs * BLOCK * 4;  // bytes of a block
  std::unique_ptr<char[]> memory(
      new char[blocks * of_keys + outs * of_values + most * wide * 6 + most * 4]);
  char *keys = memory.get(), *values = keys + blocks * of_keys;
  float *scores = (float *)(values + outs * of_values), *sums = scores + most * wide;
  uint16_t *weights = (uint16_t *)(sums + most);
  for (int64_t b = 0; b < blocks; b++)
    lay_out((const char *)k, c.length, s[5] / 2, b * BLOCK, 0, c.d / 2, keys + b * of_keys);
  for (int64_t o = 0; o < outs; o++) lay_out_values(c, v, o * BLOCK, values + o * of_values);
  __m512 tile[ROWS * VECTORS];
  const auto product = [&](int64_t rows, const uint16_t *x, int64_t stride, const char *block,
                           int64_t groups) {
    std::fill(tile, tile + ROWS * VECTORS, _mm512_setzero_ps());
    tile_of<Bfloat16>(int(rows), x, stride, block, groups, tile, block);
  };
  for (; first < last; first += most) {
    const int64_t count = std::min(most, last - first);
    for (int64_t b = 0; b < blocks; b++)
      for (int64_t r = 0; r < count; r += ROWS) {
        const int64_t some = std::min<int64_t>(ROWS, count - r);
        product(some, q + (first + r) * s[2], s[2], keys + b * of_keys, c.d / 2);
        for (int64_t i = 0; i < some; i++)
          for (int64_t n = 0; n < VECTORS; n++)
            _mm512_storeu_ps(scores + (r + i) * wide + b * BLOCK + 16 * n, tile[i * VECTORS + n]);
      }
    for (int64_t r = 0; r < count; r++) {
      const uint16_t *mask = c.mask ? c.mask + row * s[9] + (first + r) * s[10] : nullptr;
      sums[r] = weigh(c, scores + r * wide, mask, weights + r * wide);
    }
    for (int64_t r = 0; r < count; r += ROWS)
      for (int64_t o = 0; o < outs; o++) {
        const int64_t some = std::min<int64_t>(ROWS, count - r);
        product(some, weights + r * wide, wide, values + o * of_values, pairs);
        for (int64_t i = 0; i < some; i++) {
          const int64_t at = ((row * c.heads + head) * c.m + first + r + i) * c.d + o * BLOCK;
          const __m512 share = _mm512_set1_ps(sums[r + i] == 0 ? 0 : 1 / sums[r + i]);
          for (int64_t n = 0; n < VECTORS && o * BLOCK + 16 * n < c.d; n++)
            write(c.out, true, at + 16 * n, c.d - o * BLOCK - 16 * n,
                  _mm512_mul_ps(tile[i * VECTORS + n], share));
        }
      }
  }
}

}  // namespace

extern "C" {

// out (R, H, m, d) = softmax(q k' scale + mask) v for q (R, H, m, d), k and v (R, H, length, d), and
// a mask (R, m, length) or nullptr; all bfloat16.  `strides`, in numbers: of rows, heads and
// positions of q, k and v, and of rows and queries of the mask.
void dllm_attention(const void *q, const void *k, const void *v, const void *mask, void *out,
                    const int64_t *strides, int64_t rows, int64_t heads, int64_t m, int64_t length,
                    int64_t d, double scale, int threads) {
  const auto bits = [](const void *x) { return (const uint16_t *)x; };
  const Call call{bits(q), bits(k), bits(v), bits(mask), (uint16_t *)out, strides,
                  heads,   m,       length,  d,          float(scale)};
  const int64_t all = rows * heads;
  // threads share the queries of a head where there are fewer heads
  const int64_t parts = std::max<int64_t>(1, std::min(threads / all, m / ROWS));
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic)
  for (int64_t i = 0; i < all * parts; i++) {
    const int64_t head = i / parts, part = i % parts;
    attend(call, head / heads, head % heads, m * part / parts, m * (part + 1) / parts);
  }
}

}  // extern "C"
