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
constexpr int TOGETHER = 3;          // queries whose float64 sums over 64 columns fit into registers

struct Call {
  const uint16_t *q, *k, *v, *mask;
  uint16_t *out;           // (R, H, m, d)
  const int64_t *strides;  // of q, k, v: row, head, position; of the mask: row, query
  int64_t heads, m, length, d;
  float scale;
  bool exact;
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

// Scores of a query times the scale, plus the mask; their largest, finite.
float finish_scores(const Call &c, const uint16_t *mask, float *scores) {
  const __m512 scale = _mm512_set1_ps(c.scale), nothing = _mm512_set1_ps(-INFINITY);
  __m512 most = nothing;
  for (int64_t k = 0; k < c.length; k += 16) {
    __m512 score = _mm512_mul_ps(_mm512_loadu_ps(scores + k), scale);
    if (mask)
      score = _mm512_add_ps(score, read_or(mask, true, k, c.length - k, -INFINITY));
    else
      score = _mm512_mask_mov_ps(nothing, lanes(c.length - k), score);
    _mm512_storeu_ps(scores + k, score);
    most = _mm512_max_ps(most, score);
  }
  return std::max(_mm512_reduce_max_ps(most), -std::numeric_limits<float>::max());
}

// Scores of a query become weights with the largest 1, as rows of the next product; their sum.
float weigh(const Call &c, const uint16_t *mask, float *scores, uint16_t *weights) {
  const __m512 base = _mm512_set1_ps(finish_scores(c, mask, scores)), floor = _mm512_set1_ps(-87);
  const int64_t all = (c.length + 1) / 2 * 2;
  __m512 sum = _mm512_setzero_ps();
  for (int64_t k = 0; k < c.length; k += 16) {
    const __m512 apart = _mm512_sub_ps(_mm512_loadu_ps(scores + k), base);
    const __mmask16 seen = _mm512_cmp_ps_mask(apart, floor, _CMP_NLT_UQ);  // NaN, too
    const __m512 weight = _mm512_maskz_mov_ps(seen, exponential(_mm512_max_ps(floor, apart)));
    sum = _mm512_add_ps(sum, weight);
    write(weights, true, k, all - k, weight);
  }
  return _mm512_reduce_add_ps(sum);
}

// The same in float64.
double weigh_exactly(const Call &c, const uint16_t *mask, float *scores, double *weights) {
  const __m512d base = _mm512_set1_pd(finish_scores(c, mask, scores)), floor = _mm512_set1_pd(-700);
  __m512d sum = _mm512_setzero_pd();
  for (int64_t k = 0; k < c.length; k += 8) {  // scores behind the last are -inf
    const __m512d apart = _mm512_sub_pd(_mm512_cvtps_pd(_mm256_loadu_ps(scores + k)), base);
    const __mmask8 seen = _mm512_cmp_pd_mask(apart, floor, _CMP_NLT_UQ);
    const __m512d weight = _mm512_maskz_mov_pd(seen, exponential(_mm512_max_pd(floor, apart)));
    sum = _mm512_add_pd(sum, weight);
    _mm512_storeu_pd(weights + k, weight);
  }
  return _mm512_reduce_add_pd(sum);
}

// Values of all keys with the weights of N queries, over 64 columns from the first of `v` on.
template <int N>
void sum_exactly(const Call &c, const uint16_t *v, int64_t columns, const double *weights,
                 int64_t wide, const double *sums, uint16_t *out) {
  __m512d sum[N][8];
  for (int n = 0; n < N; n++)
    for (int i = 0; i < 8; i++) sum[n][i] = _mm512_setzero_pd();
  for (int64_t k = 0; k < c.length; k++, v += c.strides[8]) {
    __m512d weight[N];
    bool seen = false;  // values of hidden slots may be anything
    for (int n = 0; n < N; n++) seen |= weights[n * wide + k] != 0;
    if (!seen) continue;
    for (int n = 0; n < N; n++) weight[n] = _mm512_set1_pd(weights[n * wide + k]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const __m512 value = read_or(v, true, 16 * i, std::max<int64_t>(0, columns - 16 * i), 0);
      const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(value));
      const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(value, 1));
      for (int n = 0; n < N; n++) {
        sum[n][2 * i] = _mm512_fmadd_pd(weight[n], low, sum[n][2 * i]);
        sum[n][2 * i + 1] = _mm512_fmadd_pd(weight[n], high, sum[n][2 * i + 1]);
      }
    }
  }
  for (int n = 0; n < N; n++) {
    const __m512d share = _mm512_set1_pd(sums[n] == 0 ? 0 : 1 / sums[n]);
    for (int i = 0; i < 4 && 16 * i < columns; i++) {
      const __m256 low = _mm512_cvtpd_ps(_mm512_mul_pd(sum[n][2 * i], share));
      const __m256 high = _mm512_cvtpd_ps(_mm512_mul_pd(sum[n][2 * i + 1], share));
      write(out, true, n * c.d + 16 * i, columns - 16 * i,
            _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1));
    }
  }
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
  const int64_t of_keys = BLOCK * c.d * 2;                      // bytes of a block
  const int64_t of_values = c.exact ? 0 : pairs * BLOCK * 4;    // exact sums take them as they lie
  const int64_t of_query = 8 + wide * (4 + (c.exact ? 8 : 2));  // sum, scores, weights
  std::unique_ptr<char[]> memory(
      new char[blocks * of_keys + outs * of_values + most * of_query]);
  char *keys = memory.get(), *values = keys + blocks * of_keys;
  double *sums = (double *)(values + outs * of_values);
  float *scores = (float *)(sums + most);
  void *held = scores + most * wide;
  uint16_t *weights = (uint16_t *)held;
  double *exact_weights = (double *)held;
  for (int64_t b = 0; b < blocks; b++)
    lay_out((const char *)k, c.length, s[5] / 2, b * BLOCK, 0, c.d / 2, keys + b * of_keys);
  for (int64_t o = 0; o < outs && !c.exact; o++)
    lay_out_values(c, v, o * BLOCK, values + o * of_values);
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
      float *own = scores + r * wide;
      sums[r] = c.exact ? weigh_exactly(c, mask, own, exact_weights + r * wide)
                        : weigh(c, mask, own, weights + r * wide);
    }
    uint16_t *out = c.out + ((row * c.heads + head) * c.m + first) * c.d;
    if (c.exact) {
      for (int64_t r = 0; r < count; r += TOGETHER)
        for (int64_t i = 0; i < c.d; i += BLOCK) {
          const auto sum = count - r >= TOGETHER ? sum_exactly<TOGETHER>
                           : count - r == 2      ? sum_exactly<2>
                                                 : sum_exactly<1>;
          sum(c, v + i, c.d - i, exact_weights + r * wide, wide, sums + r, out + r * c.d + i);
        }
      continue;
    }
    for (int64_t r = 0; r < count; r += ROWS)
      for (int64_t o = 0; o < outs; o++) {
        const int64_t some = std::min<int64_t>(ROWS, count - r);
        product(some, weights + r * wide, wide, values + o * of_values, pairs);
        for (int64_t i = 0; i < some; i++) {
          const int64_t at = (r + i) * c.d + o * BLOCK;
          const float sum = float(sums[r + i]);
          const __m512 share = _mm512_set1_ps(sum == 0 ? 0 : 1 / sum);
          for (int64_t n = 0; n < VECTORS && o * BLOCK + 16 * n < c.d; n++)
            write(out, true, at + 16 * n, c.d - o * BLOCK - 16 * n,
                  _mm512_mul_ps(tile[i * VECTORS + n], share));
        }
      }
  }
}

}  // namespace

extern "C" {

// out (R, H, m, d) = softmax(q k' scale + mask) v for q (R, H, m, d), k and v (R, H, length, d), and
// a mask (R, m, length) or nullptr; all bfloat16.  `strides`, in numbers: of rows, heads and
// positions of q, k and v, and of rows and queries of the mask.  `exact`: what is summed over keys
// is summed in float64.
void dllm_attention(const void *q, const void *k, const void *v, const void *mask, void *out,
                    const int64_t *strides, int64_t rows, int64_t heads, int64_t m, int64_t length,
                    int64_t d, double scale, int exact, int threads) {
  const auto bits = [](const void *x) { return (const uint16_t *)x; };
  const Call call{bits(q), bits(k), bits(v), bits(mask), (uint16_t *)out, strides,
                  heads,   m,       length,  d,          float(scale), exact != 0};
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
