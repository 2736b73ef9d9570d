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
#include <cstring>
#include <memory>

#include "vector.h"

namespace {

constexpr int VECTORS = 4, BLOCK = 16 * VECTORS, ROWS = 6;
constexpr int64_t CHUNK = 1024;  // groups after which sums are put aside, so that a chunk stays in L2
constexpr int64_t MANY = 240;    // rows that go through a block before the next block is read

// One instruction each; as intrinsics, GCC 12 copies every accumulator.
struct Float32 {
  using In = float;
  using Sum = __m512;
  static constexpr int GROUP = 1;
  static Sum none() { return _mm512_setzero_ps(); }
  static Sum add(Sum s, __m512i x, __m512i w) {
    asm("vfmadd231ps %2, %1, %0" : "+v"(s) : "v"(x), "v"(w));
    return s;
  }
};

struct Bfloat16 {
  using In = uint16_t;
  using Sum = __m512;
  static constexpr int GROUP = 2;
  static Sum none() { return _mm512_setzero_ps(); }
  static Sum add(Sum s, __m512i x, __m512i w) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(s) : "v"(x), "v"(w));
    return s;
  }
};

struct Bytes {  // rows from 0 to 255, weights from -128 to 127
  using In = uint8_t;
  using Sum = __m512i;
  static constexpr int GROUP = 4;
  static Sum none() { return _mm512_setzero_si512(); }
  static Sum add(Sum s, __m512i x, __m512i w) {
    asm("vpdpbusd %2, %1, %0" : "+v"(s) : "v"(x), "v"(w));
    return s;
  }
};

__m512i repeated(const void *from) {
  int32_t value;
  std::memcpy(&value, from, 4);
  return _mm512_set1_epi32(value);
}

__mmask16 lanes(int64_t left) { return left >= 16 ? 0xffff : (1u << left) - 1; }

struct Output {  // rows of n numbers, float32 or bfloat16
  void *to;
  int64_t n;
  bool half;
  void put(int64_t row, int64_t column, __m512 value) const {
    write(to, half, row * n + column, n - column, value);
  }
};

// `sums` += R rows times a chunk of a block; `next` is brought into the cache meanwhile.
template <class T, int R>
void tile(const typename T::In *x, int64_t d, const char *w, int64_t groups, typename T::Sum *sums,
          const char *next) {
  typename T::Sum s[R][VECTORS];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < VECTORS; v++) s[r][v] = sums[r * VECTORS + v];
  for (int64_t g = 0; g < groups; g++, w += 64 * VECTORS, next += 64) {
    __m512i weight[VECTORS];
    for (int v = 0; v < VECTORS; v++) weight[v] = _mm512_loadu_si512(w + 64 * v);
    _mm_prefetch(next, _MM_HINT_T1);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      const __m512i row = repeated(x + r * d + g * T::GROUP);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) s[r][v] = T::add(s[r][v], row, weight[v]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < VECTORS; v++) sums[r * VECTORS + v] = s[r][v];
}

// 16 rows of `count` numbers of 32 bits, `stride` bytes apart, to columns that lie 64 * VECTORS
// bytes apart.  Rows from `rows` on are zeros.
void transpose(const char *from, int64_t stride, int64_t rows, int64_t count, char *to) {
  const __mmask16 some = lanes(count);
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i++)
    a[i] = i < rows ? _mm512_maskz_loadu_epi32(some, from + i * stride) : _mm512_setzero_si512();
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
      a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
    }
  for (int j = 0; j < 4; j++) {  // part k of a[4 i + j]: column 4 k + j of rows 4 i to 4 i + 3
    const __m512i even = _mm512_shuffle_i32x4(a[j], a[j + 4], 0x88);
    const __m512i odd = _mm512_shuffle_i32x4(a[j], a[j + 4], 0xdd);
    const __m512i more_even = _mm512_shuffle_i32x4(a[j + 8], a[j + 12], 0x88);
    const __m512i more_odd = _mm512_shuffle_i32x4(a[j + 8], a[j + 12], 0xdd);
    b[j] = _mm512_shuffle_i32x4(even, more_even, 0x88);
    b[j + 8] = _mm512_shuffle_i32x4(even, more_even, 0xdd);
    b[j + 4] = _mm512_shuffle_i32x4(odd, more_odd, 0x88);
    b[j + 12] = _mm512_shuffle_i32x4(odd, more_odd, 0xdd);
  }
  for (int64_t i = 0; i < 16 && i < count; i++) _mm512_storeu_si512(to + i * 64 * VECTORS, b[i]);
}

template <class T, int R = ROWS, class... More>
void tile_of(int rows, More... more) {
  if constexpr (R > 0) {
    if (rows == R)
      tile<T, R>(more...);
    else
      tile_of<T, R - 1>(rows, more...);
  }
}

// Groups from `first` on of the block with the rows from `row` on of a weight (n, words) as it is.
void lay_out(const char *weight, int64_t n, int64_t words, int64_t row, int64_t first,
             int64_t count, char *to) {
  for (int64_t i = 0; i < BLOCK; i += 16)
    for (int64_t k = 0; k < count; k += 16)
      transpose(weight + ((row + i) * words + first + k) * 4, words * 4, n - row - i, count - k,
                to + k * 64 * VECTORS + i * 4);
}

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
