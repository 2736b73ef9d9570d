// Rows times blocks of a weight, in registers: what products and attention are made of.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

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
  static void row(const In *x, int64_t d, Row *to) { std::copy(x, x + d, to); }
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

}  // namespace
