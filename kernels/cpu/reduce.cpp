// The largest logit of each row, its place, and sums over what the others weigh beside it.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "vector.h"

namespace {

constexpr float FLOOR = -87;  // differences end here, where exp is still a normal number

struct Row {
  const void *from;
  int64_t n;
  bool half;
  // 16 logits from column k on, -inf behind the last
  __m512 read(int64_t k) const { return read_or(from, half, k, n - k, -INFINITY); }
};

// The largest, the largest beside it, and the first column of the largest; NaN before all others.
void largest(const Row &row, float *best, float *second, int64_t *index) {
  __m512 most = _mm512_set1_ps(-INFINITY), next = most;
  __mmask16 nan = 0;
  for (int64_t k = 0; k < row.n; k += 16) {
    const __m512 x = row.read(k);
    nan |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    next = _mm512_max_ps(next, _mm512_min_ps(most, x));
    most = _mm512_max_ps(most, x);
  }
  *best = nan ? NAN : _mm512_reduce_max_ps(most);
  const __m512 wanted = _mm512_set1_ps(*best);
  *index = 0;
  for (int64_t k = 0; k < row.n; k += 16) {
    const __m512 x = row.read(k);
    const __mmask16 here = nan ? _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q)
                               : _mm512_cmp_ps_mask(x, wanted, _CMP_EQ_OQ);
    if (here) {
      *index = k + __builtin_ctz(here);
      break;
    }
  }
  // the lane that holds the largest gives its runner-up, the others their largest
  alignas(64) float lanes[16];
  _mm512_store_ps(lanes, most);
  lanes[*index % 16] = -INFINITY;
  *second = std::max(_mm512_reduce_max_ps(next), _mm512_reduce_max_ps(_mm512_load_ps(lanes)));
}

}  // namespace

extern "C" {

// Of each row of logits (m, n), float32 or, where `half`, bfloat16: `best`, its column `index` (the
// lowest of equal ones), the largest of the others `second`; over the others `rest` = the sum of
// exp(x - best) and, where it is no nullptr, `moment` = that of (x - best) exp(x - best).
void dllm_reduce(const void *logits, float *best, int64_t *index, float *second, float *rest,
                 float *moment, int64_t m, int64_t n, int64_t stride, int half, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && m > 1) schedule(static)
  for (int64_t r = 0; r < m; r++) {
    const Row row{(const char *)logits + r * stride * (half ? 2 : 4), n, bool(half)};
    largest(row, best + r, second + r, index + r);
    const __m512 base = _mm512_set1_ps(std::max(best[r], -std::numeric_limits<float>::max()));
    __m512 sum = _mm512_setzero_ps(), weighted = sum;
    for (int64_t k = 0; k < n; k += 16) {
      __mmask16 some = n - k >= 16 ? 0xffff : (1u << (n - k)) - 1;
      if (index[r] / 16 * 16 == k) some &= ~(1u << index[r] % 16);
      const __m512 apart = _mm512_max_ps(_mm512_sub_ps(row.read(k), base), _mm512_set1_ps(FLOOR));
      const __m512 weight = exponential(apart);
      sum = _mm512_mask_add_ps(sum, some, sum, weight);
      if (moment) weighted = _mm512_mask3_fmadd_ps(apart, weight, weighted, some);
    }
    rest[r] = std::isnan(best[r]) ? NAN : _mm512_reduce_add_ps(sum);
    if (moment) moment[r] = std::isnan(best[r]) ? NAN : _mm512_reduce_add_ps(weighted);
  }
}

}  // extern "C"
