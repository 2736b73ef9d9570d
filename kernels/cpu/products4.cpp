// Products with weights of 4 bits.
//
//     w = (q - 8) * scale + zero    for each output and group of inputs, q from 0 to 15
//     x = p * scale                 for each row and group of inputs, p from -127 to 127
//
// Sums of q * p are whole numbers; those of the groups are scaled and added in order, so a row does
// not depend on the others.  Weights lie in blocks as in products.cpp, 8 inputs in 32
// bits: those with even numbers in the lower halves of the bytes; of 8 inputs of a row the even ones
// come first.

#include "tiles.h"

namespace {

constexpr int FEW = 3;  // rows of a tile

// Sums of numbers q times numbers p.  Plain AVX2 sums in 16 bits, which hold those of 32 inputs.
#if defined(DLLM_VNNI)
constexpr bool SHORT = false;
Ints nibbles(Ints sum, Words q, Words p) {
  asm(DLLM_VNNI "vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(q), "v"(p));
  return sum;
}
Ints lengthened(Ints sum) { return sum; }
#elif defined(DLLM_AVX2)
constexpr bool SHORT = true;
Ints nibbles(Ints sum, Words q, Words p) {
  return (Ints)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)q, (__m256i)p));
}
Ints lengthened(Ints sum) { return (Ints)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)); }
#else
constexpr bool SHORT = false;
Ints nibbles(Ints sum, Words q, Words p) { return vdotq_s32(sum, (int8x16_t)q, (int8x16_t)p); }
Ints lengthened(Ints sum) { return sum; }
#endif

struct Call {
  const int8_t *x;
  const float *row_scale, *row_sum;  // (m, groups): scales, and scales times the sum of p
  const uint8_t *weight;
  const uint16_t *scale, *zero;  // (blocks, groups, BLOCK) bfloat16
  void *y;
  int64_t m, n, d, group;
  bool half;
};

template <int R>
void tile4(const Call &c, int64_t row, int64_t block) {
  const int64_t groups = c.d / c.group, step = SHORT ? 32 : c.group;
  const char *w = (const char *)c.weight + block * (c.d / 8) * GROUP_BYTES;
  const Words low = Words{} + 0x0f0f0f0f;
  Floats total[R][VECTORS] = {};
  for (int64_t g = 0; g < groups; g++) {
    Ints sum[R][VECTORS] = {};
    for (int64_t from = g * c.group; from < (g + 1) * c.group; from += step) {
      Ints part[R][VECTORS] = {};
      for (int64_t k = from; k < from + step; k += 8, w += GROUP_BYTES) {
        Words first[VECTORS], second[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
          const Words both = load<Words>(w + v * sizeof both);
          first[v] = both & low;
          second[v] = both >> 4 & low;
          __builtin_prefetch(w + 4096 + v * sizeof both, 0, 3);
        }
#pragma GCC unroll 3
        for (int r = 0; r < R; r++) {
          const char *eight = (const char *)c.x + (row + r) * c.d + k;
          const Words even = repeated(eight), odd = repeated(eight + 4);
#pragma GCC unroll 4
          for (int v = 0; v < VECTORS; v++)
            part[r][v] = nibbles(nibbles(part[r][v], first[v], even), second[v], odd);
        }
      }
      for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) sum[r][v] += lengthened(part[r][v]);
    }
    for (int v = 0; v < VECTORS; v++) {
      const int64_t at = (block * groups + g) * BLOCK + WIDE * v;
      const Floats scale = widened(load<Halves>(c.scale + at));
      const Floats rest = fma(all(-8.0f), scale, widened(load<Halves>(c.zero + at)));
      for (int r = 0; r < R; r++) {
        const int64_t own = (row + r) * groups + g;
        total[r][v] = fma(as<Floats>(sum[r][v]), scale * c.row_scale[own], total[r][v]);
        total[r][v] = fma(rest, all(c.row_sum[own]), total[r][v]);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < VECTORS; v++) {
      const int64_t column = block * BLOCK + WIDE * v;
      write(c.y, c.half, (row + r) * c.n + column, c.n - column, total[r][v]);
    }
}

template <int R = FEW>
void tile4_of(int rows, const Call &c, int64_t row, int64_t block) {
  if constexpr (R > 0) {
    if (rows == R)
      tile4<R>(c, row, block);
    else
      tile4_of<R - 1>(rows, c, row, block);
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
    const int64_t rows = std::min(MANY, m - first), tiles = (rows + FEW - 1) / FEW;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t b = 0; b < blocks; b++)
      for (int64_t t = 0; t < tiles; t++)
        tile4_of(int(rows * (t + 1) / tiles - rows * t / tiles), call, first + rows * t / tiles, b);
  }
}

// Rows x (m, d) in whole numbers p from -127 to 127 with one scale per `group` inputs.  `zero` is
// added to each p as it is written (128: bytes).  Where row_sum is no nullptr it gets the scale times
// the sum of the group's p, and of 8 inputs the even ones come first.
void dllm_round(const void *x, uint8_t *p, float *row_scale, float *row_sum, int64_t m, int64_t d,
                int64_t group, int zero, int half, int threads) {
  const int64_t groups = d / group;
#pragma omp parallel for num_threads(threads) if (threads > 1 && m * d > 65536) schedule(static)
  for (int64_t i = 0; i < m * groups; i++) {
    const int64_t from = i / groups * d + i % groups * group;
    const auto read = [=](int64_t k) { return read_or(x, half, from + k, group - k, 0); };
    Floats most = {};
    Ints nan = {};
    for (int64_t k = 0; k < group; k += WIDE) {
      const Floats value = read(k);
      nan |= value != value;
      most = larger(most, (Floats)((Words)value & 0x7fffffff));
    }
    const float scale = any(nan) ? NAN : std::max(largest_of(most) / 127.0f, 1e-30f);
    Ints sum = {};
    const int known = any(nan) ? 0 : -1;
    for (int64_t k = 0; k < group; k += WIDE) {
      // beside 1.5 * 2^23 a number has no place for fractions: it is rounded, to even
      const Ints q = ((Ints)(read(k) / scale + 12582912.0f) - 0x4b400000) & known;
      sum += q;
      const Bytes bytes = as<Bytes>(q + zero);
      if (group - k >= WIDE)
        store(p + from + k, bytes);
      else
        std::memcpy(p + from + k, &bytes, group - k);
    }
    row_scale[i] = scale;
    if (!row_sum) continue;
    row_sum[i] = scale * float(sum_of(sum));
    const auto even = [](uint64_t x) {  // bytes 0, 2, 4 and 6
      x &= 0x00ff00ff00ff00ff;
      x = (x | x >> 8) & 0x0000ffff0000ffff;
      return (x | x >> 16) & 0xffffffff;
    };
    for (int64_t k = from; k < from + group; k += 8) {
      const uint64_t eight = load<uint64_t>(p + k);
      store(p + k, even(eight) | even(eight >> 8) << 32);
    }
  }
}

}  // extern "C"
