// Rows times blocks of a weight, in registers: what products and attention are made of.

#pragma once

#include <omp.h>

#include <memory>
#include <new>
#include <type_traits>

#include "vector.h"

namespace {

// Memory of each thread, taken before they start: what is thrown among threads ends the process.  That
// of one thread is of whichever asks.
class Scratch {
  const int64_t each;
  const std::unique_ptr<char[]> memory;

 public:
  Scratch(int64_t bytes, int threads)
      : each(threads > 1 ? (bytes + 63) / 64 * 64 : 0),
        memory(new char[threads > 1 ? each * threads + 64 : bytes + 64]) {}
  char *own() const {
    return (char *)(((uintptr_t)memory.get() + 63) & ~uintptr_t(63)) + omp_get_thread_num() * each;
  }
};

// 0, or 2 where there is no memory: exceptions end at a function that others call.
template <class Work>
int with_memory(Work work) {
  try {
    work();
    return 0;
  } catch (const std::bad_alloc &) {
    return 2;
  }
}

// Sums of a tile fill most of the registers: 32 with AVX-512 and NEON, 16 with AVX2.
constexpr int VECTORS = WIDE == 8 ? 2 : 4, BLOCK = WIDE * VECTORS, ROWS = 6;
constexpr int64_t GROUP_BYTES = 4 * BLOCK;  // of a block, per instruction and output
constexpr int64_t CHUNK = 1024;  // groups after which sums are put aside, so that a chunk stays in L2
constexpr int64_t MANY = 240;    // rows that go through a block before the next block is read
constexpr int64_t SOON = 4096;   // bytes that a single tile fetches ahead

// What an instruction multiplies: GROUP numbers of a row, 32 bits of the weight, in PARTS steps.  A
// row is made ready with `row`, where a number is not what lies in memory (`Row`, not `In`).

#if defined(__x86_64__)
// One instruction; as an intrinsic, GCC 12 copies accumulators, here and below.
inline Floats multiplied(Floats sum, Words x, Words w) {
  asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
  return sum;
}
#else
inline Floats multiplied(Floats sum, Words x, Words w) { return fma((Floats)x, (Floats)w, sum); }
#endif

struct Float32 {
  using In = float;
  using Row = float;
  using Sum = Floats;
  static constexpr int GROUP = 1, PARTS = 1;
  static Words part(Words w, int) { return w; }
  static Sum add(Sum s, Words x, Words w) { return multiplied(s, x, w); }
};

#if defined(DLLM_AVX512) && defined(__AVX512BF16__)

struct Bfloat16 {
  using In = uint16_t;
  using Row = uint16_t;
  using Sum = Floats;
  static constexpr int GROUP = 2, PARTS = 1;
  static Words part(Words w, int) { return w; }
  static Sum add(Sum s, Words x, Words w) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(s) : "v"(x), "v"(w));
    return s;
  }
  static void row(const In *x, int64_t d, Row *to) { std::copy(x, x + d, to); }
};

#else

struct Bfloat16 {  // even and odd numbers in float32
  using In = uint16_t;
  using Row = float;
  using Sum = Floats;
  static constexpr int GROUP = 2, PARTS = 2;
  static Words part(Words w, int odd) { return odd ? w & 0xffff0000 : w << 16; }
  static Sum add(Sum s, Words x, Words w) { return multiplied(s, x, w); }
  static void row(const In *x, int64_t d, Row *to) {
    for (int64_t k = 0; k < d; k++) {
      const uint32_t bits = uint32_t(x[k]) << 16;
      to[k] = load<float>(&bits);
    }
  }
};

#endif
#if defined(DLLM_VNNI)

struct Eights {  // rows from 0 to 255, 128 for zero, weights from -128 to 127
  using In = uint8_t;
  using Row = uint8_t;
  using Sum = Ints;
  static constexpr int GROUP = 4, PARTS = 1, ZERO = 128;
  static Words part(Words w, int) { return w; }
  static Sum add(Sum s, Words x, Words w) {
    asm(DLLM_VNNI "vpdpbusd %2, %1, %0" : "+v"(s) : "v"(x), "v"(w));
    return s;
  }
};

#elif defined(DLLM_AVX2)

struct Eights {  // numbers 0 and 2, then 1 and 3 of a group, in 16 bits: sums of bytes saturate
  using In = uint8_t;
  using Row = int16_t;
  using Sum = Ints;
  static constexpr int GROUP = 4, PARTS = 2, ZERO = 0;
  static Words part(Words w, int odd) {
    const __m256i twice = (__m256i)w;
    return (Words)_mm256_srai_epi16(odd ? twice : _mm256_slli_epi16(twice, 8), 8);
  }
  static Sum add(Sum s, Words x, Words w) {
    Words pairs;
    asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(s), "=&v"(pairs) : "v"(x), "v"(w));
    return s;
  }
  static void row(const In *x, int64_t d, Row *to) {
    for (int64_t k = 0; k < d; k += 4)
      for (int i = 0; i < 4; i++) to[k + i] = x[k + i / 2 + i % 2 * 2] - 128;
  }
};

#else

struct Eights {
  using In = uint8_t;
  using Row = int8_t;
  using Sum = Ints;
  static constexpr int GROUP = 4, PARTS = 1, ZERO = 0;
  static Words part(Words w, int) { return w; }
  static Sum add(Sum s, Words x, Words w) { return vdotq_s32(s, (int8x16_t)x, (int8x16_t)w); }
  static void row(const In *x, int64_t d, Row *to) {
    for (int64_t k = 0; k < d; k++) to[k] = x[k] - 128;
  }
};

#endif

inline Words repeated(const char *from) { return load<uint32_t>(from) - Words{}; }

// `sums` += R rows, `stride` bytes apart, times a chunk of a block.  Meanwhile what lies from `next`
// on is brought into a cache, `hop` bytes per group: into the first one, where it is read `soon`.
template <class T, int R>
void tile(const char *x, int64_t stride, const char *w, int64_t groups, typename T::Sum *sums,
          const char *next, int64_t hop, bool soon) {
  typename T::Sum s[R][VECTORS];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) s[r][v] = sums[r * VECTORS + v];
  const auto add = [&](int64_t group) __attribute__((always_inline)) {
#pragma GCC unroll 2
    for (int part = 0; part < T::PARTS; part++) {
      Words weight[VECTORS];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++)
        weight[v] = T::part(load<Words>(w + group * GROUP_BYTES + v * sizeof(Words)), part);
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        const Words row = repeated(x + r * stride + (group * T::PARTS + part) * 4);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) s[r][v] = T::add(s[r][v], row, weight[v]);
      }
    }
  };
  // Groups in a turn: beside 12 sums what the loop itself needs would be a quarter of all.
  constexpr int TURN = WIDE == 8 && T::PARTS == 1 ? 4 : 1;
  int64_t g = 0;
  for (; g + TURN <= groups; g += TURN, next += TURN * hop) {
    if (soon)
      for (int64_t more = 0; more < TURN * hop; more += 64) __builtin_prefetch(next + more, 0, 3);
    else
      for (int64_t more = 0; more < TURN * hop; more += 64) __builtin_prefetch(next + more, 0, 2);
#pragma GCC unroll 4
    for (int i = 0; i < TURN; i++) add(i);
    x += TURN * T::PARTS * 4, w += TURN * GROUP_BYTES;
  }
  for (; g < groups; g++, x += T::PARTS * 4, w += GROUP_BYTES) add(0);
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) sums[r * VECTORS + v] = s[r][v];
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

// The lower or upper halves of two vectors, number by number.
template <int... I>
Words interleaved(Words a, Words b, int from, std::integer_sequence<int, I...>) {
  return Words{(I % 2 ? b : a)[from + I / 2]...};
}

// WIDE rows of `count` numbers of 32 bits, `stride` bytes apart, to columns that lie GROUP_BYTES
// apart.  Rows from `rows` on are zeros.
inline void transpose(const char *from, int64_t stride, int64_t rows, int64_t count, char *to) {
  constexpr auto each = std::make_integer_sequence<int, WIDE>();
  Words a[WIDE], b[WIDE];
  for (int i = 0; i < WIDE; i++) {
    a[i] = Words{};
    if (i < rows && count >= WIDE) a[i] = load<Words>(from + i * stride);
    if (i < rows && count < WIDE) std::memcpy(&a[i], from + i * stride, count * 4);
  }
  for (int half = 1; half < WIDE; half *= 2) {
    for (int i = 0; i < WIDE / 2; i++) {
      b[2 * i] = interleaved(a[i], a[i + WIDE / 2], 0, each);
      b[2 * i + 1] = interleaved(a[i], a[i + WIDE / 2], WIDE / 2, each);
    }
    std::copy(b, b + WIDE, a);
  }
  for (int64_t i = 0; i < WIDE && i < count; i++) store(to + i * GROUP_BYTES, a[i]);
}

// Groups from `first` on of the block with the rows from `row` on of a weight (n, words) as it is.
inline void lay_out(const char *weight, int64_t n, int64_t words, int64_t row, int64_t first,
                    int64_t count, char *to) {
  for (int64_t i = 0; i < BLOCK; i += WIDE)
    for (int64_t k = 0; k < count; k += WIDE)
      transpose(weight + ((row + i) * words + first + k) * 4, words * 4, n - row - i, count - k,
                to + k * GROUP_BYTES + i * 4);
}

}  // namespace
