// Attention of few queries over many keys.
//
// Keys are laid out once per head as the weight of a product, so that scores are tiles of queries
// times blocks of keys; so are values, with the weights of the keys as rows.  All keys of a query
// are weighed before the values are read: no number of a query depends on the others.

#include <limits>
#include <memory>

#include "tiles.h"

namespace {

using Row = Bfloat16::Row;
constexpr int64_t SCORES = 1 << 16;  // held at once, so that they stay in L2
constexpr int TOGETHER = 3;  // queries whose float64 sums over a block's columns fit into registers

struct Call {
  const uint16_t *q, *k, *v, *mask;
  uint16_t *out;           // (R, H, m, d)
  const int64_t *strides;  // of q, k, v: row, head, position; of the mask: row, query
  int64_t heads, m, length, d;
  float scale;
  bool exact;
};

// Values (length, d) from column `first` on, pairs of keys together, BLOCK numbers of each, zeros
// behind.
void lay_out_values(const Call &c, const uint16_t *v, int64_t first, char *to) {
  const auto row = [&](int64_t key, int64_t column) {
    const int64_t left = key < c.length ? std::clamp<int64_t>(c.d - column, 0, WIDE) : 0;
    const uint16_t *from = v + key * c.strides[8] + column;
    if (left == WIDE) return as<Words>(load<Halves>(from));
    Halves some = {};
    std::memcpy(&some, from, left * 2);
    return as<Words>(some);
  };
  for (int64_t key = 0; key < c.length; key += 2)
    for (int64_t i = first; i < first + BLOCK; i += WIDE, to += sizeof(Words))
      store(to, row(key, i) | row(key + 1, i) << 16);
}

// Scores of a query times the scale, plus the mask; their largest, finite.
float finish_scores(const Call &c, const uint16_t *mask, float *scores) {
  Floats most = all(-INFINITY);
  for (int64_t k = 0; k < c.length; k += WIDE) {
    Floats score = load<Floats>(scores + k) * c.scale;
    if (mask)
      score += read_or(mask, true, k, c.length - k, -INFINITY);
    else if (c.length - k < WIDE)
      score = lanes(c.length - k) ? score : all(-INFINITY);
    store(scores + k, score);
    most = larger(most, score);
  }
  return std::max(largest_of(most), -std::numeric_limits<float>::max());
}

// Scores of a query become weights with the largest 1, as rows of the next product; their sum.
float weigh(const Call &c, const uint16_t *mask, float *scores, Row *weights) {
  const float base = finish_scores(c, mask, scores);
  const int64_t size = (c.length + 1) / 2 * 2;
  Floats sum = {};
  for (int64_t k = 0; k < c.length; k += WIDE) {
    const Floats apart = load<Floats>(scores + k) - base;
    Floats weight = exponential(larger(all(-87.0f), apart));
    weight = apart < -87 ? Floats{} : apart != apart ? apart : weight;
    sum += weight;
    write(weights, sizeof(Row) == 2, k, size - k, weight);
  }
  return sum_of(sum);
}

// The same in float64.
double weigh_exactly(const Call &c, const uint16_t *mask, float *scores, double *weights) {
  const double base = finish_scores(c, mask, scores);
  Doubles sum = {};
  for (int64_t k = 0; k < c.length; k += PAIRED) {  // scores behind the last are -inf
    const Doubles apart = as<Doubles>(load<FewFloats>(scores + k)) - base;
    Doubles weight = exponential(apart > -700 ? apart : all(-700.0));
    weight = apart < -700 ? Doubles{} : apart != apart ? apart : weight;
    sum += weight;
    store(weights + k, weight);
  }
  return sum_of(sum);
}

// Values of all keys with the weights of N queries, over a block's columns from the first of `v` on.
template <int N>
void sum_exactly(const Call &c, const uint16_t *v, int64_t columns, const double *weights,
                 int64_t wide, const double *sums, uint16_t *out) {
  Doubles sum[N][2 * VECTORS] = {};
  for (int64_t k = 0; k < c.length; k++, v += c.strides[8]) {
    Doubles weight[N];
    bool seen = false;  // values of hidden slots may be anything
    for (int n = 0; n < N; n++) seen |= weights[n * wide + k] != 0;
    if (!seen) continue;
    for (int n = 0; n < N; n++) weight[n] = all(weights[n * wide + k]);
#pragma GCC unroll 4
    for (int i = 0; i < VECTORS; i++) {
      const Floats value = read_or(v, true, WIDE * i, columns - WIDE * i, 0);
      FewFloats half[2];
      std::memcpy(half, &value, sizeof value);
      for (int n = 0; n < N; n++)
        for (int j = 0; j < 2; j++)
          sum[n][2 * i + j] = fma(weight[n], as<Doubles>(half[j]), sum[n][2 * i + j]);
    }
  }
  for (int n = 0; n < N; n++) {
    const double share = sums[n] == 0 ? 0 : 1 / sums[n];
    for (int i = 0; i < VECTORS && WIDE * i < columns; i++) {
      const FewFloats half[2] = {as<FewFloats>(sum[n][2 * i] * share),
                                 as<FewFloats>(sum[n][2 * i + 1] * share)};
      write(out, true, n * c.d + WIDE * i, columns - WIDE * i, load<Floats>(half));
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
  const int64_t of_weight = c.exact ? sizeof(double) : sizeof(Row);
  const int64_t of_query = 8 + wide * (4 + of_weight) + c.d * 4;  // sum, scores, weights, numbers
  std::unique_ptr<char[]> memory(
      new char[blocks * of_keys + outs * of_values + most * of_query]);
  char *keys = memory.get(), *values = keys + blocks * of_keys;
  double *sums = (double *)(values + outs * of_values);
  float *scores = (float *)(sums + most);
  void *held = scores + most * wide;
  Row *weights = (Row *)held;
  double *exact_weights = (double *)held;
  char *queries = (char *)held + most * wide * of_weight;
  for (int64_t b = 0; b < blocks; b++)
    lay_out((const char *)k, c.length, s[5] / 2, b * BLOCK, 0, c.d / 2, keys + b * of_keys);
  for (int64_t o = 0; o < outs && !c.exact; o++)
    lay_out_values(c, v, o * BLOCK, values + o * of_values);
  Floats tile[ROWS * VECTORS];
  const auto product = [&](int64_t rows, const void *x, int64_t stride, const char *block,
                           int64_t groups) {
    std::fill(tile, tile + ROWS * VECTORS, Floats{});
    tile_of<Bfloat16>(int(rows), (const char *)x, stride, block, groups, tile, block, 0);
  };
  for (; first < last; first += most) {
    const int64_t count = std::min(most, last - first);
    const char *ready = (const char *)(q + first * s[2]);
    int64_t apart = s[2] * 2;  // bytes from query to query
    if constexpr (!std::is_same_v<Row, uint16_t>) {
      ready = queries, apart = c.d * sizeof(Row);
      for (int64_t r = 0; r < count; r++)
        Bfloat16::row(q + (first + r) * s[2], c.d, (Row *)(queries + r * apart));
    }
    for (int64_t b = 0; b < blocks; b++)
      for (int64_t r = 0; r < count; r += ROWS) {
        const int64_t some = std::min<int64_t>(ROWS, count - r);
        product(some, ready + r * apart, apart, keys + b * of_keys, c.d / 2);
        for (int64_t i = 0; i < some; i++)
          for (int64_t n = 0; n < VECTORS; n++)
            store(scores + (r + i) * wide + b * BLOCK + WIDE * n, tile[i * VECTORS + n]);
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
        product(some, weights + r * wide, wide * sizeof(Row), values + o * of_values, pairs);
        for (int64_t i = 0; i < some; i++) {
          const int64_t at = (r + i) * c.d + o * BLOCK;
          const float sum = float(sums[r + i]);
          const float share = sum == 0 ? 0 : 1 / sum;
          for (int64_t n = 0; n < VECTORS && o * BLOCK + WIDE * n < c.d; n++)
            write(out, true, at + WIDE * n, c.d - o * BLOCK - WIDE * n,
                  tile[i * VECTORS + n] * share);
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
