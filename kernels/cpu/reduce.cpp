// The largest logit of each row, its place, and sums over what the others weigh beside it.

#include <limits>

#include "vector.h"

namespace {

constexpr float FLOOR = -87;  // differences end here, where exp is still a normal number

struct Row {
  const void *from;
  int64_t n;
  bool half;
  // logits from column k on, -inf behind the last
  Floats read(int64_t k) const { return read_or(from, half, k, n - k, -INFINITY); }
};

// The largest, the largest beside it, and the first column of the largest; NaN before all others.
void largest(const Row &row, float *best, float *second, int64_t *index) {
  Floats most = all(-INFINITY), next = most;
  Ints nan = {};
  for (int64_t k = 0; k < row.n; k += WIDE) {
    const Floats x = row.read(k);
    nan |= x != x;
    next = larger(next, smaller(most, x));
    most = larger(most, x);
  }
  const bool lost = any(nan);
  *best = lost ? NAN : largest_of(most);
  *index = 0;
  for (int64_t k = 0; k < row.n; k += WIDE) {
    const Floats x = row.read(k);
    const Ints here = lost ? x != x : x == *best;
    if (!any(here)) continue;
    while (!here[*index]) ++*index;
    *index += k;
    break;
  }
  // the lane that holds the largest gives its runner-up, the others their largest
  most[*index % WIDE] = -INFINITY;
  *second = std::max(largest_of(next), largest_of(most));
}

}  // namespace

extern "C" {

// Of each row of logits (m, n), float32 or, where `half`, bfloat16: `best`, its column `index` (the
// lowest of equal ones), the largest of the others `second`; over the others `rest` = the sum of
// exp(x - best) and, where it is no nullptr, `moment` = that of (x - best) exp(x - best).  Where
// `weigh`, every logit becomes exp(x - best).
void dllm_reduce(void *logits, float *best, int64_t *index, float *second, float *rest,
                 float *moment, int64_t m, int64_t n, int64_t stride, int half, int weigh,
                 int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && m > 1) schedule(static)
  for (int64_t r = 0; r < m; r++) {
    char *from = (char *)logits + r * stride * (half ? 2 : 4);
    const Row row{from, n, bool(half)};
    largest(row, best + r, second + r, index + r);
    const float base = std::max(best[r], -std::numeric_limits<float>::max());
    Floats sum = {}, weighted = {};
    for (int64_t k = 0; k < n; k += WIDE) {
      Ints some = lanes(n - k);
      if (index[r] / WIDE * WIDE == k) some[index[r] % WIDE] = 0;
      const Floats apart = larger(row.read(k) - base, all(FLOOR)), power = exponential(apart);
      if (weigh) write(from, half, k, n - k, power);
      const Floats weight = some ? power : Floats{};
      sum += weight;
      weighted = fma(apart, weight, weighted);
    }
    rest[r] = std::isnan(best[r]) ? NAN : sum_of(sum);
    if (moment) moment[r] = std::isnan(best[r]) ? NAN : sum_of(weighted);
  }
}

// Numbers x (m, n) become `height` tanh(x / cap).
void dllm_bend(float *x, int64_t m, int64_t n, int64_t stride, float cap, float height,
               int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && m > 1) schedule(static)
  for (int64_t r = 0; r < m; r++)
    for (int64_t k = 0; k < n; k += WIDE) {
      const Floats part = read_or(x + r * stride, false, k, n - k, 0);
      write(x + r * stride, false, k, n - k, tangent(part / cap) * height);
    }
}

}  // extern "C"
