// Products for the vector unit at hand: sums of whole numbers are exact, and a row alone is the row
// among others.  Prints what differs; linked with the kernels by `test_cpu.py`.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

extern "C" {
int dllm_block();
void dllm_lay_out(const void *, void *, int64_t, int64_t, int);
int dllm_product(const void *, const void *, int, const void *, void *, int64_t, int64_t, int64_t,
                 int, int);
int dllm_product8(const uint8_t *, const float *, const void *, const float *, const int32_t *,
                  const void *, void *, int64_t, int64_t, int64_t, int, int);
void dllm_uniform(const int64_t *, const int64_t *, int64_t, int64_t, int64_t, float *, int);
}

namespace {

constexpr int M = 13, N = 70, D = 96;
uint32_t state = 1;

int drawn(int low, int high) {
  state = state * 1664525 + 1013904223;
  return low + int((state >> 8) % uint32_t(high - low));
}

std::vector<char> blocks(const void *weight, int words) {
  std::vector<char> result((N + dllm_block() - 1) / dllm_block() * dllm_block() * words * 4);
  dllm_lay_out(weight, result.data(), N, words, 1);
  return result;
}

uint16_t half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits >> 16;
}

void expect(bool right, const char *what) {
  if (!right) std::puts(what);
}

}  // namespace

int main() {
  const int64_t key[4] = {};  // of which the words are published
  float numbers[4];
  dllm_uniform(key, nullptr, 1, 0, 4, numbers, 1);
  expect(numbers[0] == float(0x6627e8d5u) * 0x1p-32f && numbers[3] == float(0x9b00dbd8u) * 0x1p-32f,
         "noise");
  std::vector<float> x(M * D), w(N * D), y(M * N), expected(M * N), ones(M + N, 1), alone(N);
  std::vector<uint16_t> half_x(M * D), half_w(N * D), half_y(M * N);
  std::vector<uint8_t> bytes(M * D);
  std::vector<int8_t> eights(N * D);
  std::vector<int32_t> total(N), sums(M * N);
  for (int i = 0; i < M * D; i++) half_x[i] = half(x[i] = drawn(-1, 2)), bytes[i] = drawn(0, 256);
  for (int i = 0; i < N * D; i++) half_w[i] = half(w[i] = drawn(-1, 2)), eights[i] = drawn(-128, 128);
  for (int n = 0; n < N; n++)
    for (int k = 0; k < D; k++) {
      total[n] += eights[n * D + k];
      for (int m = 0; m < M; m++) {
        expected[m * N + n] += x[m * D + k] * w[n * D + k];
        sums[m * N + n] += (bytes[m * D + k] - 128) * eights[n * D + k];
      }
    }
  for (bool plain : {false, true}) {
    const auto laid = blocks(w.data(), D), half_laid = blocks(half_w.data(), D / 2);
    const void *weight = plain ? (void *)w.data() : (void *)laid.data();
    dllm_product(x.data(), weight, plain, nullptr, y.data(), M, N, D, false, 1);
    expect(y == expected, "float32");
    const void *half_weight = plain ? (void *)half_w.data() : (void *)half_laid.data();
    dllm_product(half_x.data(), half_weight, plain, nullptr, half_y.data(), M, N, D, true, 1);
    for (int i = 0; i < M * N; i++) expect(half_y[i] == half(expected[i]), "bfloat16");
  }
  const auto laid = blocks(eights.data(), D / 4);
  dllm_product8(bytes.data(), ones.data(), laid.data(), ones.data(), total.data(), nullptr, y.data(),
                M, N, D, false, 1);
  for (int i = 0; i < M * N; i++) expect(y[i] == float(sums[i]), "int8");
  for (float &each : x) each = drawn(-1000, 1000) / 999.0f;
  for (float &each : w) each = drawn(-1000, 1000) / 997.0f;
  dllm_product(x.data(), w.data(), true, nullptr, y.data(), M, N, D, false, 2);
  for (int m = 0; m < M; m++) {
    dllm_product(x.data() + m * D, w.data(), true, nullptr, alone.data(), 1, N, D, false, 1);
    expect(!std::memcmp(alone.data(), y.data() + m * N, N * 4), "a row alone");
  }
  std::puts("done");
}
