// What layers do to each number or row on its own, in one pass, rounded where PyTorch rounds; and a
// decoder layer, but for its attention, in two calls.

#include "tiles.h"

extern "C" {  // of the other files
using A = const void *;
using N = int64_t;
int dllm_product(A, A, int, A, void *, N, N, N, int, int);
int dllm_product8(const uint8_t *, const float *, A, const float *, const int32_t *, A, void *, N, N,
                  N, int, int);
void dllm_product4(const int8_t *, const float *, const float *, const uint8_t *, const uint16_t *,
                   const uint16_t *, void *, N, N, N, N, int, int);
int dllm_attention(A, A, A, A, void *, const N *, N, N, N, N, N, double, int, int, int);
void dllm_round(A, uint8_t *, float *, float *, N, N, N, int, int, int);
}

namespace {

constexpr int64_t ENOUGH = 1 << 15;  // numbers from which on threads bring more than they cost

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

// y = x + other, n numbers.
void add(const void *x, const void *other, void *y, int64_t n, int half, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && n > ENOUGH) schedule(static)
  for (int64_t k = 0; k < n; k += WIDE)
    write(y, half, k, n - k, read_or(x, half, k, n - k, 0) + read_or(other, half, k, n - k, 0));
}

struct Linear {  // as in layers.py
  const void *weight, *bias;
  const void *scale, *second;  // as Weight8 and Weight4 have them, or nullptr
  int64_t outputs, inputs, plain, group;  // inputs that share a scale, of 4 bits, else 0
};

// What products read: m rows x, rounded where the weights are of whole numbers.
class Rows {
  const void *x;
  const int64_t m;
  const int half, threads;
  const int64_t count;  // of scales
  const Scratch scales, bytes;

 public:
  Rows(const void *x, const Linear &first, int64_t m, int half, int threads)
      : x(x), m(m), half(half), threads(threads),
        count(!first.scale ? 0 : first.group ? m * first.inputs / first.group : m),
        scales(count * 8, 1), bytes(first.scale ? m * first.inputs : 0, 1) {
    float *own = (float *)scales.own();
    if (first.scale)
      dllm_round(x, (uint8_t *)bytes.own(), own, first.group ? own + count : nullptr, m,
                 first.inputs, first.group ? first.group : first.inputs, first.group ? 0 : 128,
                 half, threads);
  }
  void times(const Linear &by, void *y) const {
    const float *own = (const float *)scales.own();
    const int64_t n = by.outputs, d = by.inputs;
    if (by.group) {
      dllm_product4((const int8_t *)bytes.own(), own, own + count, (const uint8_t *)by.weight,
                    (const uint16_t *)by.scale, (const uint16_t *)by.second, y, m, n, d, by.group,
                    half, threads);
      for (char *row = (char *)y; by.bias && row < (char *)y + m * n * (half ? 2 : 4);
           row += n * (half ? 2 : 4))
        add(row, by.bias, row, n, half, threads);
      return;
    }
    const bool full =
        by.scale ? dllm_product8((const uint8_t *)bytes.own(), own, by.weight,
                                 (const float *)by.scale, (const int32_t *)by.second, by.bias, y,
                                 m, n, d, half, threads)
                 : dllm_product(x, by.weight, int(by.plain), by.bias, y, m, n, d, half, threads);
    if (full) throw std::bad_alloc();
  }
};

}  // namespace

extern "C" {

struct Layer {  // as in layers.py
  Linear q, k, v, o, gate, up, down;
  const void *norm, *second_norm;
  double eps, second_eps;
};

// y (m, d) = x / sqrt(mean(x x) + eps), rounded, times weight (d), all float32 or bfloat16.
void dllm_rms_norm(const void *x, const void *weight, void *y, int64_t m, int64_t d, double eps,
                   int half, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && m * d > ENOUGH) schedule(static)
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
#pragma omp parallel for num_threads(threads) if (threads > 1 && n > ENOUGH) schedule(static)
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
#pragma omp parallel for num_threads(threads) if (threads > 1 && all * count * d > ENOUGH) \
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

// What a layer does to rows x (m, width) before its attention: norm, products, rotation, as
// `dllm_rotate_scatter` does it with the same arguments, `strides` those of keys and values.
// `work` holds m rows of the width and of what q, k and v put out.
int dllm_layer_begin(const Layer *layer, const void *x, char *work, const void *cosine,
                     const void *sine, const int64_t *slots, void *turned, void *keys, void *values,
                     const int64_t *strides, int64_t m, int64_t d, int64_t room, int halves,
                     int threads) {
  const int half = halves & 1;
  const int64_t size = m * (half ? 2 : 4), own = layer->q.outputs, shared = layer->k.outputs;
  char *q = work + size * layer->q.inputs, *k = q + size * own, *v = k + size * shared;
  dllm_rms_norm(x, layer->norm, work, m, layer->q.inputs, layer->eps, half, threads);
  const int full = with_memory([=] {
    const Rows rows(work, layer->q, m, half, threads);
    rows.times(layer->q, q);
    rows.times(layer->k, k);
    rows.times(layer->v, v);
  });
  if (full) return full;
  const int64_t all[] = {d, own,        d,          shared,     d,
                         shared, strides[0], strides[1], strides[2], strides[3]};
  return dllm_rotate_scatter(q, k, v, cosine, sine, slots, turned, keys, values, all, own / d,
                             shared / d, m, d, room, halves, threads);
}

// And after it: y (m, width) from x and what was `attended`.  `work` holds m rows of the width and
// of what gate and up put out.
int dllm_layer_end(const Layer *layer, const void *x, const void *attended, char *work, void *y,
                   int64_t m, int half, int threads) {
  const int64_t size = m * (half ? 2 : 4), width = layer->o.outputs, wide = layer->gate.outputs;
  char *gate = work + size * width, *up = gate + size * wide;
  return with_memory([=] {
    Rows(attended, layer->o, m, half, threads).times(layer->o, work);
    add(x, work, y, m * width, half, threads);
    dllm_rms_norm(y, layer->second_norm, work, m, width, layer->second_eps, half, threads);
    const Rows rows(work, layer->gate, m, half, threads);
    rows.times(layer->gate, gate);
    rows.times(layer->up, up);
    dllm_silu_times(gate, up, gate, m * wide, half, threads);
    Rows(gate, layer->down, m, half, threads).times(layer->down, work);
    add(y, work, y, m * width, half, threads);
  });
}

// Both, and between them attention of all rows over `length` keys from the slot `first` on, with
// `mask` (queries of a head of keys, length) or nullptr.  `work`: what the two need, the larger, and
// three times the numbers of all queries.
int dllm_layer(const Layer *layer, const void *x, char *work, const void *cosine, const void *sine,
               const int64_t *slots, char *keys, char *values, const int64_t *strides,
               const void *mask, void *y, int64_t m, int64_t d, int64_t room, int64_t first,
               int64_t length, double scale, int exact, int halves, int threads) {
  const int half = halves & 1;
  const int64_t size = half ? 2 : 4, own = layer->q.outputs, shared = layer->k.outputs;
  char *turned = work, *attended = turned + m * own * size, *rows = attended + m * own * size;
  char *rest = rows + m * own * size;
  const int refused = dllm_layer_begin(layer, x, rest, cosine, sine, slots, turned, keys, values,
                                       strides, m, d, room, halves, threads);
  if (refused) return refused;
  const int64_t queries = m * own / shared;  // heads that share keys attend them as one
  const int64_t all[] = {0, queries * d, d,          0, strides[0], strides[1],
                         0, strides[2],  strides[3], 0, length};
  const int full = dllm_attention(turned, keys + first * strides[1] * size,
                                  values + first * strides[3] * size, mask, attended, all, 1,
                                  shared / d, queries, length, d, scale, exact, half, threads);
  if (full) return full;
  for (int64_t p = 0; p < m; p++)
    for (int64_t h = 0; h < own / d; h++)
      std::memcpy(rows + (p * own + h * d) * size, attended + (h * m + p) * d * size, d * size);
  return dllm_layer_end(layer, x, rows, rest, y, m, half, threads);
}

}  // extern "C"
