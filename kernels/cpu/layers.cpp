// What layers do to each number or row on its own, in one pass, rounded where PyTorch rounds; and
// decoder layers in one call.

#include <numeric>
#include <vector>

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

constexpr int64_t GATES = 3 << 18;  // bytes of them that stay in L2
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
  const void *norm, *second_norm, *q_norm, *k_norm;  // the latter of each head, or nullptr
  double eps, second_eps, q_eps, k_eps;
};

struct Part {  // as in layers.py: queries, and the keys that they attend
  int64_t first, count, rows;      // `count` queries of each of `rows` rows, one after the other
  int64_t begin, length, stride;   // slots from `begin` on, of each row `stride` behind the last
  const int64_t *chosen;           // or these slots, counted from `begin` on
  const void *mask;                // (rows, queries of heads that share keys, length), or nullptr

  bool holds(int64_t query) const { return query >= first && query < first + rows * count; }
  bool fits(int64_t m, int64_t room) const {
    if (first < 0 || count < 0 || rows < 1 || begin < 0 || length < 1 || stride < 0) return false;
    if (first + rows * count > m) return false;
    const int64_t left = room - begin - (rows - 1) * stride;
    if (!chosen) return length <= left;
    return std::all_of(chosen, chosen + length, [=](int64_t at) { return at >= 0 && at < left; });
  }
};

}  // extern "C"

namespace {

// Rows that alone are worked out, with memory for them; nothing where all are.
class Kept {
  const bool apart;
  const int64_t *kept;
  const int64_t n, row, angle;  // bytes of a row, and of its angles
  const Scratch memory;

  const char *pick(const char *from, int64_t bytes, char *to) const {
    if (!apart) return from;
    for (int64_t i = 0; i < n; i++) std::memcpy(to + i * bytes, from + kept[i] * bytes, bytes);
    return to;
  }

 public:
  Kept(bool apart, const int64_t *kept, int64_t n, int64_t row, int64_t angle)
      : apart(apart), kept(kept), n(n), row(row), angle(angle),
        memory(apart ? n * (3 * row + 2 * angle) : 0, 1) {}
  char *room(int which) const { return memory.own() + which * n * row; }
  const char *of(const char *rows, int which) const { return pick(rows, row, room(which)); }
  const char *angles(const char *from, int which) const {
    return pick(from, angle, room(3) + which * n * angle);
  }

  // For these queries, which lie one after the other now, `attend` what `parts` say of them.
  template <class Attend>
  void parts(const Part *parts, int64_t many, int64_t sharing, int64_t size, Attend attend) const {
    const Part *part = parts;
    for (int64_t i = 0, end; i < n; i = end) {
      end = i + 1;
      for (int64_t tried = 0; tried < many && !part->holds(kept[i]); tried++)
        if (++part == parts + many) part = parts;
      if (!many || !part->holds(kept[i])) continue;
      const int64_t r = (kept[i] - part->first) / part->count;
      const int64_t first = part->first + r * part->count;
      while (end < n && kept[end] >= first && kept[end] < first + part->count) end++;
      Part one{i, end - i, 1, part->begin + r * part->stride, part->length, 0, part->chosen, nullptr};
      const int64_t bytes = one.length * size;
      const Scratch mask(part->mask ? sharing * one.count * bytes : 0, 1);
      for (int64_t to = 0; to < sharing * one.count && part->mask; to++) {
        const int64_t from = (r * sharing + to / one.count) * part->count +
                             kept[i + to % one.count] - first;
        std::memcpy(mask.own() + to * bytes, (const char *)part->mask + from * bytes, bytes);
        one.mask = mask.own();
      }
      attend(one);
    }
  }
};

}  // namespace

extern "C" {

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
    const int64_t head = i % all, p = i / all;  // as they lie where a layer makes them
    if (head < heads) {
      turn.row(q, head * strides[0] + p * strides[1], p, turned, (head * count + p) * d);
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

// y (m, n): its row i is row i / each of x (m / each, d) times the matrix of group of[i], one of `count`,
// or 1 where there is no such group.
int dllm_grouped(const Linear *groups, int64_t count, const int64_t *of, int64_t each, const char *x,
                 char *y, int64_t m, int half, int threads) {
  if (!std::all_of(of, of + m, [=](int64_t g) { return g >= 0 && g < count; })) return 1;
  const int64_t d = groups->inputs * (half ? 2 : 4), n = groups->outputs * (half ? 2 : 4);
  int full = 0;
  const int none = with_memory([&] {
    std::vector<int64_t> rows(m), first;  // rows group by group, where each group begins
    std::iota(rows.begin(), rows.end(), 0);
    std::stable_sort(rows.begin(), rows.end(), [=](int64_t a, int64_t b) { return of[a] < of[b]; });
    int64_t most = 0;
    for (int64_t i = 0; i < m; i++) {
      if (!i || of[rows[i]] != of[rows[i - 1]]) first.push_back(i);
      most = std::max(most, i + 1 - first.back());
    }
    const int64_t used = first.size();
    first.push_back(m);
    const int apart = used < threads ? 1 : threads, within = used < threads ? threads : 1;
    const Scratch memory(most * (d + n), apart);
#pragma omp parallel for num_threads(apart) if (apart > 1) schedule(dynamic) reduction(max : full)
    for (int64_t g = 0; g < used; g++) {
      const int64_t *own = &rows[first[g]], some = first[g + 1] - first[g];
      char *const from = memory.own(), *const to = from + some * d;
      for (int64_t i = 0; i < some; i++) std::memcpy(from + i * d, x + own[i] / each * d, d);
      full = std::max(full, with_memory([&] {
        const Linear &by = groups[of[*own]];
        Rows(from, by, some, half, within).times(by, to);
      }));
      for (int64_t i = 0; i < some; i++) std::memcpy(y + own[i] * n, to + i * n, n);
    }
  });
  return std::max(none, full);
}

// y (m, width), which may be x: a decoder layer's output for rows x, whose keys and values go to
// `slots` as `dllm_rotate_scatter` takes them, `strides` those of keys and values.  `parts` say who
// attends what; other queries attend nothing; 3 where a part reads what is not there.  Where n < m,
// only the rows `kept` (n) are worked out, and the others of y are those of x.
static int one_layer(const Layer *layer, const char *x, const char *cosine, const char *sine,
                     const int64_t *slots, char *keys, char *values, const int64_t *strides,
                     const Part *parts, int64_t many, const int64_t *kept, int64_t n, char *y,
                     int64_t m, int64_t d, int64_t room, double scale, int exact, int halves,
                     int threads) {
  const int half = halves & 1;
  const int64_t width = layer->q.inputs, own = layer->q.outputs, shared = layer->k.outputs;
  const int64_t wide = layer->gate.outputs, heads = own / d, kv = shared / d;
  const int64_t size = half ? 2 : 4, angle = halves & 2 ? 2 : 4;
  const int64_t most = n * size;
  const bool apart = n < m;
  const int64_t fit = GATES / (2 * wide * size) / ROWS * ROWS;
  const int64_t step = std::min(n, fit < 32 ? n : fit);  // rows whose gates stay in a cache
  if (!std::all_of(parts, parts + many, [=](const Part &part) { return part.fits(m, room); }))
    return 3;
  if (apart && !std::all_of(kept, kept + n, [=](int64_t at) { return at >= 0 && at < m; })) return 3;
  int refused = 0;
  const int full = with_memory([&] {
    const int64_t larger = std::max(n * own + m * 2 * shared, step * 2 * wide);
    const Scratch memory((n * 3 * own + m * width + larger) * size, 1);
    char *const turned = memory.own(), *const attended = turned + most * own;
    char *const rows = attended + most * own, *const normed = rows + most * own;
    char *const q = normed + m * width * size, *const k = q + most * own;
    char *const v = k + m * shared * size, *const gate = q, *const up = gate + step * wide * size;
    const auto norm_heads = [=](char *x, const void *by, int64_t count, double eps) {
      if (by) dllm_rms_norm(x, by, x, count, d, eps, half, threads);
    };
    dllm_rms_norm(x, layer->norm, normed, m, width, layer->eps, half, threads);
    {
      const Rows read(normed, layer->k, m, half, threads);
      read.times(layer->k, k);
      read.times(layer->v, v);
      if (!apart) read.times(layer->q, q);
    }
    norm_heads(k, layer->k_norm, m * kv, layer->k_eps);
    if (!apart) norm_heads(q, layer->q_norm, m * heads, layer->q_eps);
    const int64_t all[] = {d, own,        d,          shared,     d,
                           shared, strides[0], strides[1], strides[2], strides[3]};
    refused = dllm_rotate_scatter(q, k, v, cosine, sine, slots, turned, keys, values, all,
                                  apart ? 0 : heads, kv, m, d, room, halves, threads);
    if (refused) return;
    const Kept these(apart, kept, n, width * size, d * angle);
    const char *const wanted = these.of(x, 0);
    char *const result = apart ? these.room(2) : y;
    if (apart) {
      Rows(these.of(normed, 1), layer->q, n, half, threads).times(layer->q, q);
      norm_heads(q, layer->q_norm, n * heads, layer->q_eps);
      dllm_rotate_scatter(q, k, v, these.angles(cosine, 0), these.angles(sine, 1), slots, turned,
                          keys, values, all, heads, 0, n, d, room, halves, threads);
    }
    // Heads that share keys attend them as one, with their queries one after the other.
    const auto attend = [=](const Part &part) {
      const int64_t queries = part.rows * part.count, run = part.count * d * size;
      const int64_t length = part.length, folded = own / shared * part.count;
      const bool whole = part.rows == 1 && part.count == n;
      for (int64_t r = 0, to = 0; r < part.rows && !whole; r++)  // what q held is turned already
        for (int64_t h = 0; h < heads; h++, to += run)
          std::memcpy(q + to, turned + (h * n + part.first + r * part.count) * d * size, run);
      const int64_t begin = part.begin * size;
      const char *from[] = {keys + begin * strides[1], values + begin * strides[3]};
      int64_t along[] = {kv * folded * d, folded * d, d,
                         part.stride * strides[1], strides[0], strides[1],
                         part.stride * strides[3], strides[2], strides[3],
                         folded * length, length};
      const Scratch gathered(part.chosen ? 2 * part.rows * kv * length * d * size : 0, 1);
      for (int side = 0; side < 2 && part.chosen; side++) {
        char *to = gathered.own() + side * part.rows * kv * length * d * size;
        const char *source = from[side];
        int64_t *of = along + 3 + 3 * side;  // strides of rows, heads and slots
        from[side] = to;
        for (int64_t r = 0; r < part.rows; r++)
          for (int64_t h = 0; h < kv; h++)
            for (int64_t i = 0; i < length; i++, to += d * size)
              std::memcpy(to, source + (r * of[0] + h * of[1] + part.chosen[i] * of[2]) * size,
                          d * size);
        of[0] = kv * length * d, of[1] = length * d, of[2] = d;
      }
      if (dllm_attention(whole ? turned : q, from[0], from[1], part.mask, attended, along,
                         part.rows, kv, folded, length, d, scale, exact, half, threads))
        throw std::bad_alloc();
      for (int64_t i = 0; i < queries; i++)
        for (int64_t h = 0; h < heads; h++) {
          const int64_t r = i / part.count, at = (r * heads + h) * part.count + i % part.count;
          std::memcpy(rows + ((part.first + i) * own + h * d) * size, attended + at * d * size,
                      d * size);
        }
    };
    std::memset(rows, 0, most * own);
    if (apart)
      these.parts(parts, many, own / shared, size, attend);
    else
      std::for_each(parts, parts + many, attend);
    Rows(rows, layer->o, n, half, threads).times(layer->o, normed);
    add(wanted, normed, result, n * width, half, threads);
    dllm_rms_norm(result, layer->second_norm, normed, n, width, layer->second_eps, half, threads);
    for (int64_t first = 0; first < n; first += step) {
      const int64_t some = std::min(step, n - first);
      char *const from = normed + first * width * size;
      const Rows read(from, layer->gate, some, half, threads);
      read.times(layer->gate, gate);
      read.times(layer->up, up);
      dllm_silu_times(gate, up, gate, some * wide, half, threads);
      Rows(gate, layer->down, some, half, threads).times(layer->down, from);
    }
    add(result, normed, result, n * width, half, threads);
    if (!apart) return;
    if (y != x) std::memcpy(y, x, m * width * size);
    for (int64_t i = 0; i < n; i++)
      std::memcpy(y + kept[i] * width * size, result + i * width * size, width * size);
  });
  return full ? full : refused;
}

// What each of `count` layers, one behind the other, makes of rows x, with keys and values of its
// own, goes to its y, which may be that of another; the last one alone knows rows that are `kept`.
int dllm_layers(const Layer *layers, int64_t count, const char *x, const char *cosine,
                const char *sine, const int64_t *slots, char *const *keys, char *const *values,
                const int64_t *strides, const Part *parts, int64_t many, const int64_t *kept,
                int64_t n, char *const *y, int64_t m, int64_t d, int64_t room, double scale,
                int exact, int halves, int threads) {
  int refused = 0;
  for (int64_t i = 0; i < count && !refused; i++)
    refused = one_layer(layers + i, i ? y[i - 1] : x, cosine, sine, slots, keys[i], values[i],
                        strides, parts, many, kept, i + 1 < count ? m : n, y[i], m, d, room, scale,
                        exact, halves, threads);
  return refused;
}

}  // extern "C"
