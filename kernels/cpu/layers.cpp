// What layers do to each number or row on its own, in one pass, rounded where PyTorch rounds.

#include "vector.h"

namespace {

constexpr int64_t MANY = 1 << 15;  // numbers from which on threads bring more than they cost

// Rows of 2 * half numbers whose first half turns against the second.
struct Turn {
  const void *cosine, *sine;  // (Q, 2 half)
  int64_t half;
  bool half_angles, half_input, half_output;
  bool rounds() const { return half_angles && half_input; }  // no float32 anywhere

  void row(const void *from, int64_t at, int64_t position, void *to, int64_t there) const {
    for (int64_t i = 0; i < half; i += WIDE) {
      const int64_t left = half - i, angle = position * 2 * half + i;
      const Floats a = read_or(from, half_input, at + i, left, 0);
      const Floats b = read_or(from, half_input, at + half + i, left, 0);
      for (int64_t second = 0; second < 2; second++) {
        const int64_t move = second * half;
        const Floats c = read_or(cosine, half_angles, angle + move, left, 0);
        const Floats s = read_or(sine, half_angles, angle + move, left, 0);
        Floats straight = (second ? b : a) * c, across = (second ? a : -b) * s;
        if (rounds()) straight = to_bfloat16(straight), across = to_bfloat16(across);
        const Floats sum = straight + across;
        write(to, half_output, there + move + i, left, rounds() ? to_bfloat16(sum) : sum);
      }
    }
  }
};

}  // namespace

extern "C" {

// y (m, d) = x / sqrt(mean(x x) + eps), rounded, times weight (d), all float32 or bfloat16.
void dllm_rms_norm(const void *x, const void *weight, void *y, int64_t m, int64_t d, double eps,
                   int half, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && m * d > MANY) schedule(static)
  for (int64_t r = 0; r < m; r++) {
    Floats sums[4] = {};
    for (int64_t k = 0; k < d; k += WIDE) {
      const Floats value = read_or(x, half, r * d + k, d - k, 0);
      sums[k / WIDE % 4] = fma(value, value, sums[k / WIDE % 4]);
    }
    const Floats sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    const float scale = 1 / std::sqrt(sum_of(sum) / d + float(eps));
    for (int64_t k = 0; k < d; k += WIDE) {
      Floats value = read_or(x, half, r * d + k, d - k, 0) * scale;
      if (half) value = to_bfloat16(value);
      write(y, half, r * d + k, d - k, value * read_or(weight, half, k, d - k, 0));
    }
  }
}

// y = x / (1 + exp(-x)), rounded, times other: n numbers of float32 or bfloat16.
void dllm_silu_times(const void *x, const void *other, void *y, int64_t n, int half, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && n > MANY) schedule(static)
  for (int64_t k = 0; k < n; k += WIDE) {
    const Floats value = read_or(x, half, k, n - k, 0);
    const Floats down = larger(all(-87.0f), smaller(all(88.0f), -value));
    Floats gated = value / (exponential(down) + 1);
    if (half) gated = to_bfloat16(gated);
    write(y, half, k, n - k, gated * read_or(other, half, k, n - k, 0));
  }
}

// Queries (H, Q, d) and keys (Hkv, Q, d) turned by the angles (Q, d); keys and values go to slots
// (Q) of their buffers (Hkv, S, d), unless one of them lies outside: 1; queries to `turned`
// (H, Q, d).  `strides`: of heads and positions, in numbers, for q, k, v, and of heads and slots for
// the two buffers.  Bits of `halves`: q, k and v are bfloat16, the angles are, the buffers and
// `turned` are.
int dllm_rotate_scatter(const void *q, const void *k, const void *v, const void *cosine,
                        const void *sine, const int64_t *slots, void *turned, void *keys,
                        void *values, const int64_t *strides, int64_t heads, int64_t shared,
                        int64_t count, int64_t d, int64_t room, int halves, int threads) {
  for (int64_t p = 0; p < count; p++)
    if (slots[p] < 0 || slots[p] >= room) return 1;
  const Turn turn{cosine, sine, d / 2, bool(halves & 2), bool(halves & 1), bool(halves & 4)};
  const int64_t all = heads + shared;
#pragma omp parallel for num_threads(threads) if (threads > 1 && all * count * d > MANY) \
    schedule(static)
  for (int64_t i = 0; i < all * count; i++) {
    const int64_t head = i / count, p = i % count;
    if (head < heads) {
      turn.row(q, head * strides[0] + p * strides[1], p, turned, i * d);
      continue;
    }
    const int64_t own = head - heads;
    turn.row(k, own * strides[2] + p * strides[3], p, keys, own * strides[6] + slots[p] * strides[7]);
    const int64_t from = own * strides[4] + p * strides[5];
    const int64_t to = own * strides[8] + slots[p] * strides[9];
    if (turn.half_input == turn.half_output) {
      const int64_t size = turn.half_input ? 2 : 4;
      std::memcpy((char *)values + to * size, (const char *)v + from * size, d * size);
      continue;
    }
    for (int64_t n = 0; n < d; n += WIDE)
      write(values, turn.half_output, to + n, d - n,
            read_or(v, turn.half_input, from + n, d - n, 0));
  }
  return 0;
}

}  // extern "C"
