// Products of a few rows with the weight of a linear layer, in the vector unit at hand.
//
// A weight (n, d) is laid out in blocks of BLOCK outputs, zeros behind the last.  In a block the
// inputs come in groups of 1 (float32), 2 (bfloat16) or 4 (8 bits), which fill 32 bits: for each
// group the numbers of output 0, then of output 1, ...  A tile of at most ROWS rows times one
// block is summed in registers, group after group, so a row's sums do not depend on the other rows
// or on the number of threads.

#include "tiles.h"

namespace {

struct Output {  // rows of n numbers, float32 or bfloat16
  void *to;
  int64_t n;
  bool half;
  void put(int64_t row, int64_t column, Floats value) const {
    write(to, half, row * n + column, n - column, value);
  }
};

// done(column)(row, sum of WIDE outputs) for all of x (m, d) times the weight, which is laid out in
// blocks or, where it is `plain`, now.
template <class T, class Done>
void product(const typename T::In *x, const void *weight, bool plain, int64_t m, int64_t n,
             int64_t d, int threads, Done done) {
  using Row = typename T::Row;
  constexpr bool READY = std::is_same_v<Row, typename T::In>;
  const int64_t blocks = (n + BLOCK - 1) / BLOCK, groups = d / T::GROUP;
  const int64_t size = groups * GROUP_BYTES;    // bytes of a block
  const int64_t stride = groups * T::PARTS * 4;  // of a row
  const int64_t chunk = plain ? std::min(CHUNK, groups) * GROUP_BYTES : 0;
  const Scratch made(READY ? 0 : std::min(MANY, m) * d * sizeof(Row), 1);
  const Scratch scratch(std::min(MANY, m) * GROUP_BYTES + chunk, threads);
  Row *const laid = (Row *)made.own();
  for (int64_t first = 0; first < m; first += MANY) {
    const int64_t rows = std::min(MANY, m - first), tiles = (rows + ROWS - 1) / ROWS;
    const char *ready = READY ? (const char *)(x + first * d) : (const char *)laid;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      if constexpr (!READY) {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) T::row(x + (first + r) * d, d, laid + r * d);
      }
      const int64_t own = rows * GROUP_BYTES;
      auto *sums = (typename T::Sum *)scratch.own();
#pragma omp for schedule(static)
      for (int64_t b = 0; b < blocks; b++) {
        const char *w = (const char *)weight + b * size;
        std::fill(sums, sums + rows * VECTORS, typename T::Sum{});
        for (int64_t g = 0; g < groups; g += CHUNK) {
          const int64_t count = std::min(CHUNK, groups - g);
          const char *part = w + g * GROUP_BYTES;
          if (plain) {
            char *to = (char *)sums + own;
            lay_out((const char *)weight, n, groups, b * BLOCK, g, count, to);
            part = to;
          }
          for (int64_t t = 0; t < tiles; t++) {
            const int64_t from = rows * t / tiles, to = rows * (t + 1) / tiles;
            // a single tile waits for memory: it fetches what it reads itself
            const bool alone = tiles == 1;
            const int64_t hop = plain           ? 0
                                : tiles * 64 < GROUP_BYTES
                                    ? (GROUP_BYTES / 64 + tiles - 1) / tiles * 64
                                    : GROUP_BYTES / tiles;
            const char *next = part + (alone ? SOON : size + count * t * hop);
            tile_of<T>(int(to - from), ready + from * stride + g * T::PARTS * 4, stride, part,
                       count, sums + from * VECTORS, next, hop, alone);
            if (g + count < groups) continue;
            for (int64_t v = 0; v < VECTORS && b * BLOCK + WIDE * v < n; v++) {
              const auto put = done(b * BLOCK + WIDE * v);
              for (int64_t r = from; r < to; r++) put(first + r, sums[r * VECTORS + v]);
            }
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
             [=](int64_t column) {
               const Floats more = bias ? read_or(bias, y.half, column, y.n - column, 0) : Floats{};
               return [=](int64_t row, Floats sum) { y.put(row, column, bias ? sum + more : sum); };
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

// Outputs of a block.
int dllm_block() { return BLOCK; }

// y (m, n) = x (m, d) times the weight, plus bias (n) or nullptr; all float32 or, where `half`,
// bfloat16.  `plain`: the weight is (n, d) as it is, to be laid out for this product.
int dllm_product(const void *x, const void *weight, int plain, const void *bias, void *y,
                  int64_t m, int64_t n, int64_t d, int half, int threads) {
  const Output output{y, n, bool(half)};
  return with_memory([=] {
    half ? with_bias<Bfloat16>(x, weight, plain, bias, output, m, d, threads)
         : with_bias<Float32>(x, weight, plain, bias, output, m, d, threads);
  });
}

// y (m, n) = bytes x (m, d), 128 for zero, times a packed weight of 8 bits, times the scales of
// the outputs (n) and then of the rows (m), rounded, plus bias (n) or nullptr.  `total` (n): the sum
// of each output's numbers.  Sums are of 32 bits: d is at most 65,793, (2^31 - 1) / (255 x 128).
int dllm_product8(const uint8_t *x, const float *row_scale, const void *weight, const float *scale,
                   const int32_t *total, const void *bias, void *y, int64_t m, int64_t n, int64_t d,
                   int half, int threads) {
  const Output output{y, n, bool(half)};
  const auto done = [=](int64_t column) {
    const int64_t left = std::min<int64_t>(WIDE, n - column);
    Ints moved = {};
    if (Eights::ZERO && left == WIDE)
      moved = load<Ints>(total + column);  // a copy of any length would be read before it is there
    else if (Eights::ZERO)
      std::memcpy(&moved, total + column, left * 4);
    moved *= Eights::ZERO;
    const Floats own = read_or(scale, false, column, left, 0);
    const Floats more = bias ? read_or(bias, half, column, left, 0) : Floats{};
    return [=](int64_t row, Ints sum) {
      Floats value = as<Floats>(sum - moved) * own * row_scale[row];
      if (bias && half) value = to_bfloat16(value);
      output.put(row, column, bias ? value + more : value);
    };
  };
  return with_memory([=] { product<Eights>(x, weight, false, m, n, d, threads, done); });
}

}  // extern "C"
