// Products of a few rows with the weight of a linear layer, for processors with AVX-512.
//
// A weight (n, d) is laid out in blocks of BLOCK outputs, zeros behind the last.  In a block the
// inputs come in groups of 1 (float32), 2 (bfloat16) or 4 (8 bits), what one instruction sums: for
// each group the numbers of output 0, then of output 1, ...  A tile of at most ROWS rows times one
// block is summed in registers, group after group, so a row's sums do not depend on the other rows
// or on the number of threads.

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <memory>

#include "tiles.h"
#include "vector.h"

namespace {

struct Output {  // rows of n numbers, float32 or bfloat16
  void *to;
  int64_t n;
  bool half;
  void put(int64_t row, int64_t column, __m512 value) const {
    write(to, half, row * n + column, n - column, value);
  }
};

// done(row, column, sum of 16 outputs) for all of x (m, d) times the weight, which is laid out in
// blocks or, where it is `plain`, now.
template <class T, class Done>
void product(const typename T::In *x, const void *weight, bool plain, int64_t m, int64_t n,
             int64_t d, int threads, Done done) {
  const int64_t blocks = (n + BLOCK - 1) / BLOCK, groups = d / T::GROUP;
  const int64_t size = groups * 64 * VECTORS;  // bytes of a block
  for (int64_t first = 0; first < m; first += MANY) {
    const int64_t rows = std::min(MANY, m - first), tiles = (rows + ROWS - 1) / ROWS;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      const int64_t own = rows * VECTORS * 64;
      const int64_t chunk = plain ? std::min(CHUNK, groups) * 64 * VECTORS : 0;
      std::unique_ptr<char[]> memory(new char[own + chunk + 64]);
      auto *sums = (typename T::Sum *)(((uintptr_t)memory.get() + 63) & ~uintptr_t(63));
#pragma omp for schedule(static)
      for (int64_t b = 0; b < blocks; b++) {
        const char *w = (const char *)weight + b * size;
        std::fill(sums, sums + rows * VECTORS, T::none());
        for (int64_t g = 0; g < groups; g += CHUNK) {
          const int64_t count = std::min(CHUNK, groups - g);
          const char *part = w + g * 64 * VECTORS;
          if (plain) {
            char *to = (char *)sums + own;
            lay_out((const char *)weight, n, groups, b * BLOCK, g, count, to);
            part = to;
          }
          for (int64_t t = 0; t < tiles; t++) {
            const int64_t from = rows * t / tiles, to = rows * (t + 1) / tiles;
            const bool ahead = t < VECTORS && tiles >= VECTORS && b + 1 < blocks && !plain;
            const char *next = ahead ? part + size + count * t * 64 : part;
            tile_of<T>(int(to - from), x + (first + from) * d + g * T::GROUP, d, part, count,
                       sums + from * VECTORS, next);
            if (g + count < groups) continue;
            for (int64_t r = from; r < to; r++)
              for (int64_t v = 0; v < VECTORS && b * BLOCK + 16 * v < n; v++)
                done(first + r, b * BLOCK + 16 * v, sums[r * VECTORS + v]);
          }
        }
      }
    }
  }
}

template <class T>
void with_bias(const void *x, const void *weight, bool plain, const void *bias, Output y, int64_t m,
               int64_t d, int threads) {
  product<T>((const typename T::In *)x, weight, plain, m, y.n, d, threads,
             [=](int64_t row, int64_t column, __m512 sum) {
               if (bias) sum += read_or(bias, y.half, column, y.n - column, 0);
               y.put(row, column, sum);
             });
}

}  // namespace

extern "C" {

// A weight (n, words), of 32 bits each, in blocks.
void dllm_lay_out(const void *weight, void *blocks, int64_t n, int64_t words, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t row = 0; row < n; row += BLOCK)
    lay_out((const char *)weight, n, words, row, 0, words, (char *)blocks + row * words * 4);
}

// y (m, n) = x (m, d) times the weight, plus bias (n) or nullptr; all float32 or, where `half`,
// bfloat16.  `plain`: the weight is (n, d) as it is, to be laid out for this product.
void dllm_product(const void *x, const void *weight, int plain, const void *bias, void *y,
                  int64_t m, int64_t n, int64_t d, int half, int threads) {
  const Output output{y, n, bool(half)};
  half ? with_bias<Bfloat16>(x, weight, plain, bias, output, m, d, threads)
       : with_bias<Float32>(x, weight, plain, bias, output, m, d, threads);
}

// y (m, n) = bytes x (m, d), 128 for zero, times a packed weight of 8 bits, times the scales of
// the outputs (n) and then of the rows (m).  `offset` (n): 128 times the sum of each output's
// numbers.
void dllm_product8(const uint8_t *x, const float *row_scale, const void *weight, const float *scale,
                   const int32_t *offset, void *y, int64_t m, int64_t n, int64_t d, int half,
                   int threads) {
  const Output output{y, n, bool(half)};
  product<Bytes>(x, weight, false, m, n, d, threads, [=](int64_t row, int64_t column, __m512i sum) {
    const __mmask16 some = lanes(n - column);
    sum = _mm512_sub_epi32(sum, _mm512_maskz_loadu_epi32(some, offset + column));
    const __m512 scaled = _mm512_cvtepi32_ps(sum) * _mm512_maskz_loadu_ps(some, scale + column);
    output.put(row, column, scaled * _mm512_set1_ps(row_scale[row]));
  });
}

}  // extern "C"
