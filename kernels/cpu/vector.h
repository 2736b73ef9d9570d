// Vectors of numbers: reading them, and exp.

#pragma once

#include <immintrin.h>

#include <cstdint>

// 16 numbers from the k-th on, float32 or, where `half`, bfloat16; `other` from `left` on.
inline __m512 read_or(const void *from, bool half, int64_t k, int64_t left, float other) {
  const __mmask16 some = left >= 16 ? 0xffff : (1u << left) - 1;
  const __m512 rest = _mm512_set1_ps(other);
  if (!half) return _mm512_mask_loadu_ps(rest, some, (const float *)from + k);
  const __m256i raw = _mm256_maskz_loadu_epi16(some, (const uint16_t *)from + k);
  const __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16);
  return _mm512_mask_mov_ps(rest, some, (__m512)wide);
}

// 16 numbers to the k-th on, those before `left`.
inline void write(void *to, bool half, int64_t k, int64_t left, __m512 value) {
  const __mmask16 some = left >= 16 ? 0xffff : (1u << left) - 1;
  if (half)
    _mm256_mask_storeu_epi16((uint16_t *)to + k, some, (__m256i)_mm512_cvtneps_pbh(value));
  else
    _mm512_mask_storeu_ps((float *)to + k, some, value);
}

// exp(x) for x from -87 to 88, to about a unit in the last place: 2^n exp(r) with |r| <= ln 2 / 2,
// and a polynomial of the sixth degree for the latter.
inline __m512 exponential(__m512 x) {
  const auto times = [](__m512 a, __m512 b, float c) {
    return _mm512_fmadd_ps(a, b, _mm512_set1_ps(c));
  };
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.0f / 720);
  p = times(p, r, 1.0f / 120);
  p = times(p, r, 1.0f / 24);
  p = times(p, r, 1.0f / 6);
  p = times(p, r, 0.5f);
  p = times(p, r, 1);
  p = times(p, r, 1);
  return _mm512_scalef_ps(p, n);
}

// exp(x) for x from -700 to 700 in float64, to some units in the last place: as above, with |r| and
// a polynomial of the eleventh degree.
inline __m512d exponential(__m512d x) {
  const auto times = [](__m512d a, __m512d b, double c) {
    return _mm512_fmadd_pd(a, b, _mm512_set1_pd(c));
  };
  const __m512d n = _mm512_roundscale_pd(_mm512_mul_pd(x, _mm512_set1_pd(1.4426950408889634)), 8);
  __m512d r = _mm512_fnmadd_pd(n, _mm512_set1_pd(0.693147180369123816490), x);
  r = _mm512_fnmadd_pd(n, _mm512_set1_pd(1.90821492927058770002e-10), r);
  double factorial = 39916800;
  __m512d p = _mm512_set1_pd(1 / factorial);
  for (int i = 11; i > 0; i--) p = times(p, r, 1 / (factorial /= i));
  return _mm512_scalef_pd(p, n);
}
