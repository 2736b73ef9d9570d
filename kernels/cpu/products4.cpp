// Products with weights of 4 bits, for processors with AVX-512 and VNNI.
//
//     w = (q - 8) * scale + zero    for each output and group of inputs, q from 0 to 15
//     x = p * scale                 for each row and group of inputs, p from -127 to 127
//
// Sums of q * p are whole numbers; those of the groups are scaled and added in order, so a row does
// not depend on the others.  Weights lie in blocks of 64 outputs as in products.cpp, 8 inputs in 32
// bits: those with even numbers in the lower halves of the bytes; of 8 inputs of a row the even ones
// come first.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "vector.h"

namespace {

constexpr int VECTORS = 4, BLOCK = 16 * VECTORS, ROWS = 3;
constexpr int64_t MANY = 240;

struct Call {
  const int8_t *x;
  const float *row_scale, *row_sum;  // (m, groups): scales, and scales times the sum of p
  const uint8_t *weight;
  const uint16_t *scale, *zero;  // (blocks, groups, BLOCK) bfloat16
  void *y;
  int64_t m, n, d, group;
  bool half;
};

__m512 wide(const uint16_t *from) {
  return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((__m256i *)from)), 16);
}

template <int R>
void tile(const Call &c, int64_t row, int64_t block) {
  const int64_t groups = c.d / c.group;
  const uint8_t *w = c.weight + block * (c.d / 8) * 64 * VECTORS;
  const __m512i low = _mm512_set1_epi8(15);
  __m512 total[R][VECTORS];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < VECTORS; v++) total[r][v] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; g++) {
    __m512i sum[R][VECTORS];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < VECTORS; v++) sum[r][v] = _mm512_setzero_si512();
    for (int64_t k = g * c.group; k < (g + 1) * c.group; k += 8, w += 64 * VECTORS) {
      __m512i first[VECTORS], second[VECTORS];
      for (int v = 0; v < VECTORS; v++) {
        const __m512i both = _mm512_loadu_si512(w + 64 * v);
        first[v] = _mm512_and_si512(both, low);
        second[v] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
      }
      for (int v = 0; v < VECTORS; v++) _mm_prefetch(w + 4096 + 64 * v, _MM_HINT_T0);
#pragma GCC unroll 3
      for (int r = 0; r < R; r++) {
        int32_t four[2];
        std::memcpy(four, c.x + (row + r) * c.d + k, 8);
        const __m512i a = _mm512_set1_epi32(four[0]), b = _mm512_set1_epi32(four[1]);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
          asm("vpdpbusd %2, %1, %0" : "+v"(sum[r][v]) : "v"(first[v]), "v"(a));
          asm("vpdpbusd %2, %1, %0" : "+v"(sum[r][v]) : "v"(second[v]), "v"(b));
        }
      }
    }
    for (int v = 0; v < VECTORS; v++) {
      const int64_t at = (block * groups + g) * BLOCK + 16 * v;
      const __m512 scale = wide(c.scale + at);
      const __m512 rest = _mm512_fnmadd_ps(_mm512_set1_ps(8), scale, wide(c.zero + at));
      for (int r = 0; r < R; r++) {
        const int64_t own = (row + r) * groups + g;
        const __m512 scaled = scale * _mm512_set1_ps(c.row_scale[own]);
        total[r][v] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][v]), scaled, total[r][v]);
        total[r][v] = _mm512_fmadd_ps(rest, _mm512_set1_ps(c.row_sum[own]), total[r][v]);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < VECTORS; v++) {
      const int64_t column = block * BLOCK + 16 * v, left = c.n - column;
      if (left > 0) write(c.y, c.half, (row + r) * c.n + column, left, total[r][v]);
    }
}

template <int R = ROWS>
void tile_of(int rows, const Call &c, int64_t row, int64_t block) {
  if constexpr (R > 0) {
    if (rows == R)
      tile<R>(c, row, block);
    else
      tile_of<R - 1>(rows, c, row, block);
  }
}

}  // namespace

extern "C" {

// y (m, n), float32 or, where `half`, bfloat16, of the rows and the weight above.
void dllm_product4(const int8_t *x, const float *row_scale, const float *row_sum,
                   const uint8_t *weight, const uint16_t *scale, const uint16_t *zero, void *y,
                   int64_t m, int64_t n, int64_t d, int64_t group, int half, int threads) {
  const Call call{x, row_scale, row_sum, weight, scale, zero, y, m, n, d, group, bool(half)};
  const int64_t blocks = (n + BLOCK - 1) / BLOCK;
  for (int64_t first = 0; first < m; first += MANY) {
    const int64_t rows = std::min(MANY, m - first), tiles = (rows + ROWS - 1) / ROWS;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t b = 0; b < blocks; b++)
      for (int64_t t = 0; t < tiles; t++)
        tile_of(int(rows * (t + 1) / tiles - rows * t / tiles), call, first + rows * t / tiles, b);
  }
}

// Rows x (m, d) in whole numbers p from -127 to 127 with one scale per `group` inputs.  `zero` is
// added to each p as it is written (128: bytes).  Where row_sum is no nullptr it gets the scale times
// the sum of the group's p, and of 8 inputs the even ones come first.
void dllm_round(const void *x, uint8_t *p, float *row_scale, float *row_sum, int64_t m, int64_t d,
                int64_t group, int zero, int half, int threads) {
  const int64_t groups = d / group;
  const __m128i apart = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
  const __m512 positive = (__m512)_mm512_set1_epi32(0x7fffffff);
#pragma omp parallel for num_threads(threads) if (threads > 1 && m * d > 65536) schedule(static)
  for (int64_t i = 0; i < m * groups; i++) {
    const int64_t from = i / groups * d + i % groups * group;
    const auto read = [=](int64_t k) { return read_or(x, half, from + k, group - k, 0); };
    __m512 most = _mm512_setzero_ps();
    __mmask16 nan = 0;
    for (int64_t k = 0; k < group; k += 16) {
      const __m512 value = read(k);
      nan |= _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
      most = _mm512_max_ps(most, _mm512_and_ps(value, positive));
    }
    const float scale = nan ? NAN : std::max(_mm512_reduce_max_ps(most) / 127.0f, 1e-30f);
    __m512i sum = _mm512_setzero_si512();
    for (int64_t k = 0; k < group; k += 16) {
      const __mmask16 some = group - k >= 16 ? 0xffff : (1u << (group - k)) - 1;
      const __m512i q = _mm512_cvtps_epi32(_mm512_div_ps(read(k), _mm512_set1_ps(scale)));
      sum = _mm512_add_epi32(sum, q);
      const __m512i moved = _mm512_add_epi32(q, _mm512_set1_epi32(zero));
      __m128i bytes = _mm512_cvtepi32_epi8(moved);
      if (row_sum) bytes = _mm_shuffle_epi8(bytes, apart);
      _mm_mask_storeu_epi8(p + from + k, some, bytes);
    }
    row_scale[i] = scale;
    if (row_sum) row_sum[i] = scale * float(_mm512_reduce_add_epi32(sum));
  }
}

}  // extern "C"
