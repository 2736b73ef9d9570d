// Attention of few queries over many keys.
//
// Keys are laid out once per head as the weight of a product, so that scores are tiles of queries
// times blocks of keys; so are values, with the weights of the keys as rows.  All keys of a query
// are weighed before the values are read: no number of a query depends on the others.

#include <limits>

#include "tiles.h"

namespace {

constexpr int64_t SCORES = 1 << 16;  // held at once, so that they stay in L2
constexpr int TOGETHER = 3;  // queries whose float64 sums over a block's columns fit into registers

struct Call {
  const void *q, *k, *v, *mask;
  void *out;               // (R, H, m, d)
  const int64_t *strides;  // of q, k, v: row, head, position; of the mask: row, query
  int64_t heads, m, length, d;
  float scale;
  bool exact;
};

// Values (length, d) from column `first` on, keys of a group together, BLOCK numbers of each, zeros
// behind.
template <class T>
void lay_out_values(const Call &c, const typename T::In *v, int64_t first, char *to) {
  using Some = std::conditional_t<T::GROUP == 1, Words, Halves>;
  const auto row = [&](int64_t key, int64_t column) {
    const int64_t left = key < c.length ? std::clamp<int64_t>(c.d - column, 0, WIDE) : 0;
    const typename T::In *from = v + key * c.strides[8] + column;
    if (left == WIDE) return as<Words>(load<Some>(from));
    Some some = {};
    std::memcpy(&some, from, left * sizeof *from);
    return as<Words>(some);
  };
  for (int64_t key = 0; key < c.length; key += T::GROUP)
    for (int64_t i = first; i < first + BLOCK; i += WIDE, to += sizeof(Words))
      store(to, T::GROUP == 1 ? row(key, i) : row(key, i) | row(key + 1, i) << 16);
}

// Scores of a query times the scale, plus the mask; their largest, finite.
float finish_scores(const Call &c, const void *mask, bool half, float *scores) {
  Floats most = all(-INFINITY);
  for (int64_t k = 0; k < c.length; k += WIDE) {
    Floats score = load<Floats>(scores + k) * c.scale;
    if (mask)
      score += read_or(mask, half, k, c.length - k, -INFINITY);
    else if (c.length - k < WIDE)
      score = lanes(c.length - k) ? score : all(-INFINITY);
    store(scores + k, score);
    most = larger(most, score);
  }
  return std::max(largest_of(most), -std::numeric_limits<float>::max());
}

// Scores of a query become weights with the largest 1, as rows of the next product; their sum.
template <class T>
float weigh(const Call &c, const void *mask, float *scores, typename T::Row *weights) {
  const float base = finish_scores(c, mask, T::GROUP == 2, scores);
  const int64_t size = (c.length + T::GROUP - 1) / T::GROUP * T::GROUP;
  Floats sum = {};
  for (int64_t k = 0; k < c.length; k += WIDE) {
    const Floats apart = load<Floats>(scores + k) - base;
    Floats weight = exponential(larger(all(-87.0f), apart));
    weight = apart < -87 ? Floats{} : apart != apart ? apart : weight;
    sum += weight;
    write(weights, sizeof *weights == 2, k, size - k, weight);
  }
  return sum_of(sum);
}

// The same in float64.
double weigh_exactly(const Call &c, const void *mask, bool half, float *scores, double *weights) {
  const double base = finish_scores(c, mask, half, scores);
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
template <class T, int N>
void sum_exactly(const Call &c, const typename T::In *v, int64_t columns, const double *weights,
                 int64_t wide, const double *sums, typename T::In *out) {
  constexpr bool HALF = T::GROUP == 2;
  Doubles sum[N][2 * VECTORS] = {};
  for (int64_t k = 0; k < c.length; k++, v += c.strides[8]) {
    Doubles weight[N];
    bool seen = false;  // values of hidden slots may be anything
    for (int n = 0; n < N; n++) seen |= weights[n * wide + k] != 0;
    if (!seen) continue;
    for (int n = 0; n < N; n++) weight[n] = all(weights[n * wide + k]);
#pragma GCC unroll 4
    for (int i = 0; i < VECTORS; i++) {
      const Floats value = read_or(v, HALF, WIDE * i, columns - WIDE * i, 0);
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
      write(out, HALF, n * c.d + WIDE * i, columns - WIDE * i, load<Floats>(half));
    }
  }
}

struct Sizes {  // of what up to `count` queries of a head need
  int64_t blocks, wide, outs, groups, most, of_keys, of_values, of_weight, bytes;
};

template <class T>
Sizes sizes_of(const Call &c, int64_t count) {
  Sizes s;
  s.blocks = (c.length + BLOCK - 1) / BLOCK, s.wide = s.blocks * BLOCK;
  s.outs = (c.d + BLOCK - 1) / BLOCK, s.groups = (c.length + T::GROUP - 1) / T::GROUP;
  s.most = std::min(count, std::max<int64_t>(ROWS, SCORES / s.wide / ROWS * ROWS));
  s.of_keys = BLOCK * c.d * sizeof(typename T::In);        // bytes of a block
  s.of_values = c.exact ? 0 : s.groups * BLOCK * 4;        // exact sums take them as they lie
  s.of_weight = c.exact ? sizeof(double) : sizeof(typename T::Row);
  const int64_t of_query = 8 + s.wide * (4 + s.of_weight) + c.d * 4;  // sum, scores, weights, numbers
  s.bytes = s.blocks * s.of_keys + s.outs * s.of_values + s.most * of_query;
  return s;
}

// Queries from `first` to `last` of a head, in the memory from `keys` on.
template <class T>
void attend(const Call &c, int64_t row, int64_t head, int64_t first, int64_t last, char *keys) {
  using In = typename T::In;
  using Row = typename T::Row;
  constexpr bool HALF = T::GROUP == 2;
  const int64_t *s = c.strides;
  const In *q = (const In *)c.q + row * s[0] + head * s[1];
  const In *k = (const In *)c.k + row * s[3] + head * s[4];
  const In *v = (const In *)c.v + row * s[6] + head * s[7];
  const auto [blocks, wide, outs, groups, most, of_keys, of_values, of_weight, bytes] =
      sizes_of<T>(c, last - first);
  char *values = keys + blocks * of_keys;
  double *sums = (double *)(values + outs * of_values);
  float *scores = (float *)(sums + most);
  void *held = scores + most * wide;
  Row *weights = (Row *)held;
  double *exact_weights = (double *)held;
  char *queries = (char *)held + most * wide * of_weight;
  for (int64_t b = 0; b < blocks; b++)
    lay_out((const char *)k, c.length, s[5] / T::GROUP, b * BLOCK, 0, c.d / T::GROUP,
            keys + b * of_keys);
  for (int64_t o = 0; o < outs && !c.exact; o++)
    lay_out_values<T>(c, v, o * BLOCK, values + o * of_values);
  Floats tile[ROWS * VECTORS];
  const auto product = [&](int64_t rows, const void *x, int64_t stride, const char *block,
                           int64_t inner) {
    std::fill(tile, tile + ROWS * VECTORS, Floats{});
    tile_of<T>(int(rows), (const char *)x, stride, block, inner, tile, block, 0, false);
  };
  for (; first < last; first += most) {
    const int64_t count = std::min(most, last - first);
    const char *ready = (const char *)(q + first * s[2]);
    int64_t apart = s[2] * sizeof(In);  // bytes from query to query
    if constexpr (!std::is_same_v<Row, In>) {
      ready = queries, apart = c.d * sizeof(Row);
      for (int64_t r = 0; r < count; r++)
        T::row(q + (first + r) * s[2], c.d, (Row *)(queries + r * apart));
    }
    for (int64_t b = 0; b < blocks; b++)
      for (int64_t r = 0; r < count; r += ROWS) {
        const int64_t some = std::min<int64_t>(ROWS, count - r);
        product(some, ready + r * apart, apart, keys + b * of_keys, c.d / T::GROUP);
        for (int64_t i = 0; i < some; i++)
          for (int64_t n = 0; n < VECTORS; n++)
            store(scores + (r + i) * wide + b * BLOCK + WIDE * n, tile[i * VECTORS + n]);
      }
    for (int64_t r = 0; r < count; r++) {
      const In *mask = (const In *)c.mask;
      if (mask) mask += row * s[9] + (first + r) * s[10];
      float *own = scores + r * wide;
      sums[r] = c.exact ? weigh_exactly(c, mask, HALF, own, exact_weights + r * wide)
                        : weigh<T>(c, mask, own, weights + r * wide);
    }
    In *out = (In *)c.out + ((row * c.heads + head) * c.m + first) * c.d;
    if (c.exact) {
      for (int64_t r = 0; r < count; r += TOGETHER)
        for (int64_t i = 0; i < c.d; i += BLOCK) {
          const auto sum = count - r >= TOGETHER ? sum_exactly<T, TOGETHER>
                           : count - r == 2      ? sum_exactly<T, 2>
                                                 : sum_exactly<T, 1>;
          sum(c, v + i, c.d - i, exact_weights + r * wide, wide, sums + r, out + r * c.d + i);
        }
      continue;
    }
    for (int64_t r = 0; r < count; r += ROWS)
      for (int64_t o = 0; o < outs; o++) {
        const int64_t some = std::min<int64_t>(ROWS, count - r);
        product(some, weights + r * wide, wide * sizeof(Row), values + o * of_values, groups);
        for (int64_t i = 0; i < some; i++) {
          const int64_t at = (r + i) * c.d + o * BLOCK;
          const float sum = float(sums[r + i]);
          const float share = sum == 0 ? 0 : 1 / sum;
          for (int64_t n = 0; n < VECTORS && o * BLOCK + WIDE * n < c.d; n++)
            write(out, HALF, at + WIDE * n, c.d - o * BLOCK - WIDE * n,
                  tile[i * VECTORS + n] * share);
        }
      }
  }
}

template <class T>
void attend_all(const Call &c, int64_t rows, int threads) {
  const int64_t all = rows * c.heads;
  // threads share the queries of a head where there are fewer heads
  const int64_t parts = std::max<int64_t>(1, std::min(threads / all, c.m / ROWS));
  const Scratch scratch(sizes_of<T>(c, (c.m + parts - 1) / parts).bytes, threads);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic)
  for (int64_t i = 0; i < all * parts; i++) {
    const int64_t head = i / parts, part = i % parts;
    attend<T>(c, head / c.heads, head % c.heads, c.m * part / parts, c.m * (part + 1) / parts,
              scratch.own());
  }
}

}  // namespace

extern "C" {

// out (R, H, m, d) = softmax(q k' scale + mask) v for q (R, H, m, d), k and v (R, H, length, d), and
// a mask (R, m, length) or nullptr; all float32 or, where `half`, bfloat16.  `strides`, in numbers: of rows, heads and
// positions of q, k and v, and of rows and queries of the mask.  `exact`: what is summed over keys
// is summed in float64.
int dllm_attention(const void *q, const void *k, const void *v, const void *mask, void *out,
                    const int64_t *strides, int64_t rows, int64_t heads, int64_t m, int64_t length,
                    int64_t d, double scale, int exact, int half, int threads) {
  const Call call{q, k, v, mask, out, strides, heads, m, length, d, float(scale), exact != 0};
  return with_memory([=] {
    half ? attend_all<Bfloat16>(call, rows, threads) : attend_all<Float32>(call, rows, threads);
  });
}

}  // extern "C"
