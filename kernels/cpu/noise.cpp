// Philox4x32-10 (Salmon et al., SC 2011): uniform numbers that are known by name.

#include <algorithm>
#include <cstdint>

namespace {

constexpr int LANES = 32;  // counters at a time: plain loops, of which the compiler makes vectors
constexpr float BELOW_ONE = 0x1.fffffep-1f;

// The words (4, LANES) of counters that stand in the first row; `key` is (seed, stream, position,
// step).
void philox(const int64_t *key, uint32_t (*words)[LANES]) {
  uint32_t *a = words[0], *b = words[1], *c = words[2], *d = words[3];
  std::fill_n(b, LANES, uint32_t(key[2]));
  std::fill_n(c, LANES, uint32_t(key[3]));
  std::fill_n(d, LANES, uint32_t(key[1]));
  uint32_t low = uint32_t(key[0]), high = uint32_t(uint64_t(key[0]) >> 32);
  for (int round = 0; round < 10; round++, low += 0x9E3779B9, high += 0xBB67AE85)
    for (int i = 0; i < LANES; i++) {
      const uint64_t p = uint64_t(0xD2511F53) * a[i], q = uint64_t(0xCD9E8D57) * c[i];
      a[i] = uint32_t(q >> 32) ^ b[i] ^ low;
      b[i] = uint32_t(q);
      c[i] = uint32_t(p >> 32) ^ d[i] ^ high;
      d[i] = uint32_t(p);
    }
}

float uniform(uint32_t word) { return std::min((float(word) + 0.5f) * 0x1p-32f, BELOW_ONE); }

}  // namespace

extern "C" {

// Uniform numbers in (0, 1) for n ids of each of m rows, whose `keys` (m, 4) are seed, stream,
// position and step: those of `tokens` (m, n), or where it is nullptr those from `first` on.
void dllm_uniform(const int64_t *keys, const int64_t *tokens, int64_t m, int64_t first, int64_t n,
                  float *result, int threads) {
  const int64_t begin = first / 4, counters = tokens ? n : (first + n + 3) / 4 - begin;
  const int64_t pieces = (counters + LANES - 1) / LANES;
#pragma omp parallel for num_threads(threads) if (threads > 1 && m * n > 16384) schedule(static)
  for (int64_t piece = 0; piece < m * pieces; piece++) {
    const int64_t row = piece / pieces, at = piece % pieces * LANES;
    uint32_t words[4][LANES];
    float numbers[LANES][4], *into = result + row * n;
    const int64_t *own = tokens ? tokens + row * n + at : nullptr;
    const int many = int(std::min<int64_t>(LANES, counters - at));
    for (int i = 0; i < LANES; i++)
      words[0][i] = uint32_t(!own ? begin + at + i : i < many ? own[i] >> 2 : 0);
    philox(keys + 4 * row, words);
    for (int word = 0; word < 4; word++)
      for (int i = 0; i < LANES; i++) numbers[i][word] = uniform(words[word][i]);
    if (own)
      for (int i = 0; i < many; i++) into[at + i] = numbers[i][own[i] & 3];
    const int64_t base = 4 * (begin + at);
    const int64_t from = std::max(first, base), to = std::min(first + n, base + 4 * many);
    if (!own) std::copy(*numbers + (from - base), *numbers + (to - base), into + (from - first));
  }
}

}  // extern "C"
