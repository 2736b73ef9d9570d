// Vectors as wide as the processor's: reading, writing, sums, exp.  Plain operators of GCC and Clang
// where they become one instruction, with the lanes in any order that the processor likes.

#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VNNI__)
#define DLLM_AVX512
constexpr int WIDE = 16;  // numbers of 32 bits in a vector
#elif defined(__AVX2__)
#define DLLM_AVX2
constexpr int WIDE = 8;
#else
constexpr int WIDE = 4;
#endif
#if defined(DLLM_AVX512)  // bytes times bytes in one instruction
#define DLLM_VNNI ""
#elif defined(__AVXVNNI__)
#define DLLM_VNNI "%{vex%} "
#endif
constexpr int PAIRED = WIDE / 2;  // numbers of 64 bits

typedef float Floats __attribute__((vector_size(4 * WIDE)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDE)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDE)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDE)));
typedef int8_t Bytes __attribute__((vector_size(WIDE)));
typedef double Doubles __attribute__((vector_size(8 * PAIRED)));
typedef int64_t Longs __attribute__((vector_size(8 * PAIRED)));
typedef float FewFloats __attribute__((vector_size(4 * PAIRED)));

template <class T>
T load(const void *from) {
  T result;
  std::memcpy(&result, from, sizeof result);
  return result;
}

template <class T>
void store(void *to, T value) {
  std::memcpy(to, &value, sizeof value);
}

// Numbers of one vector as those of another.
template <class To, class From>
To as(From value) {
  return __builtin_convertvector(value, To);
}

inline Floats all(float x) { return x - Floats{}; }
inline Doubles all(double x) { return x - Doubles{}; }

#if defined(DLLM_AVX512)
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Doubles fma(Doubles a, Doubles b, Doubles c) { return _mm512_fmadd_pd(a, b, c); }
#elif defined(DLLM_AVX2)
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Doubles fma(Doubles a, Doubles b, Doubles c) { return _mm256_fmadd_pd(a, b, c); }
#else
inline Floats fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
inline Doubles fma(Doubles a, Doubles b, Doubles c) { return vfmaq_f64(c, a, b); }
#endif

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }  // b where one is NaN
inline Floats smaller(Floats a, Floats b) { return a < b ? a : b; }

template <class T, class Join>
auto folded(T value, Join join) {
  constexpr int count = sizeof value / sizeof value[0];
  std::remove_reference_t<decltype(value[0])> lane[count];
  std::memcpy(lane, &value, sizeof value);
  for (int half = count / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lane[i] = join(lane[i], lane[i + half]);
  return lane[0];
}

template <class T>
auto sum_of(T value) {
  return folded(value, [](auto a, auto b) { return a + b; });
}

inline float largest_of(Floats value) {
  return folded(value, [](float a, float b) { return std::max(a, b); });
}

inline bool any(Ints mask) {
  uint64_t parts[sizeof mask / 8], result = 0;
  std::memcpy(parts, &mask, sizeof mask);
  for (uint64_t part : parts) result |= part;
  return result;
}

template <int... I>
Ints counted(std::integer_sequence<int, I...>) {
  return Ints{I...};
}

// Which lanes are those of numbers before `left`.
inline Ints lanes(int64_t left) {
  const int most = int(std::clamp<int64_t>(left, 0, WIDE));
  return counted(std::make_integer_sequence<int, WIDE>()) < most;
}

// bfloat16 and float32.
inline Floats widened(Halves x) { return (Floats)(as<Words>(x) << 16); }

inline Halves halved(Floats x) {
  const Words bits = (Words)x;
  const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return as<Halves>(x == x ? rounded : Words{} + 0x7fc0);
}

inline Floats to_bfloat16(Floats x) { return widened(halved(x)); }

// Numbers from the k-th on, float32 or, where `half`, bfloat16; `other` from `left` on.
inline Floats read_or(const void *from, bool half, int64_t k, int64_t left, float other) {
  const float *whole = (const float *)from + k;
  const uint16_t *short_ = (const uint16_t *)from + k;
  if (left >= WIDE) return half ? widened(load<Halves>(short_)) : load<Floats>(whole);
  Floats result = all(other);
  for (int64_t i = 0; i < left; i++) {
    const uint32_t bits = half ? uint32_t(short_[i]) << 16 : 0;
    result[i] = half ? load<float>(&bits) : whole[i];
  }
  return result;
}

// Numbers to the k-th on, those before `left`.
inline void write(void *to, bool half, int64_t k, int64_t left, Floats value) {
  char *at = (char *)to + k * (half ? 2 : 4);
  if (left >= WIDE) {
    half ? store(at, halved(value)) : store(at, value);
  } else if (left > 0) {
    const Floats some = value;  // whose address is taken: `value` stays in its register
    const Halves shorter = halved(value);
    half ? std::memcpy(at, &shorter, left * 2) : std::memcpy(at, &some, left * 4);
  }
}

// exp(x) for x from -87 to 88, to about a unit in the last place: 2^n exp(r) with |r| <= ln 2 / 2,
// and a polynomial of the sixth degree for the latter.  Beside 1.5 * 2^23 a number has no place for
// fractions, and its last bits are n.
inline Floats exponential(Floats x) {
  constexpr float beside = 12582912;
  const Floats moved = x * 1.44269504f + beside, n = moved - beside;
  Floats r = fma(-n, all(0.693359375f), x), p = all(1.0f / 720);
  r = fma(n, all(2.12194440e-4f), r);
  for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma(p, r, all(c));
  return p * (Floats)(((Words)moved << 23) + (127u << 23));
}

// tanh(x) to some units in the last place: m / (m + 2) with m = exp(2 x) - 1 = 2^n (exp(r) - 1) + 2^n - 1.
inline Floats tangent(Floats x) {
  constexpr float beside = 12582912;
  const Floats twice = smaller(larger(x + x, all(-20.0f)), all(20.0f));
  const Floats moved = twice * 1.44269504f + beside, n = moved - beside;
  Floats r = fma(-n, all(0.693359375f), twice), p = all(1.0f / 5040);
  r = fma(n, all(2.12194440e-4f), r);
  for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f}) p = fma(p, r, all(c));
  const Floats power = (Floats)(((Words)moved << 23) + (127u << 23));
  const Floats m = fma(power, p * r, power - 1);
  return x == x ? m / (m + 2) : x;
}

// exp(x) for x from -700 to 700 in float64, to some units in the last place: as above, with a
// polynomial of the eleventh degree.
inline Doubles exponential(Doubles x) {
  constexpr double beside = 6755399441055744;
  const Doubles moved = x * 1.4426950408889634 + beside, n = moved - beside;
  Doubles r = fma(-n, all(0.693147180369123816490), x);
  r = fma(-n, all(1.90821492927058770002e-10), r);
  double factorial = 39916800;
  Doubles p = all(1 / factorial);
  for (int i = 11; i > 0; i--) p = fma(p, r, all(1 / (factorial /= i)));
  return p * (Doubles)(((Longs)moved << 52) + (1023LL << 52));
}
