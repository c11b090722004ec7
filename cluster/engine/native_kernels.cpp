// The engine's CPU kernels: a matrix product for few rows and attention over pages, both float32.
//
// Compiled on first use by native_kernels.py, called through ctypes. Written with the compiler's vector types, so it
// builds for any CPU. Every output element is summed in one fixed order that depends on its own inputs alone: results
// are the same to the bit for every batch and every way of cutting a prompt into chunks.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __FMA__
#include <immintrin.h>
#endif

namespace {

constexpr int kLanes = 8;
typedef float Vec __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t IntVec __attribute__((vector_size(kLanes * sizeof(int32_t))));
typedef float Half __attribute__((vector_size(4 * sizeof(float))));

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

// a * b + c. Said outright where the CPU has it: left to itself the compiler fuses in some loops and not in others, and
// the last bit would depend on the shape of the batch.
inline Vec multiply_add(Vec a, Vec b, Vec c) {
#ifdef __FMA__
  return reinterpret_cast<Vec>(_mm256_fmadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b),
                                               reinterpret_cast<__m256>(c)));
#else
  return a * b + c;
#endif
}

inline float sum_lanes(Vec v) {
  Half halves[2];
  std::memcpy(halves, &v, sizeof v);
  const Half h = halves[0] + halves[1];
  return (h[0] + h[2]) + (h[1] + h[3]);
}

// R rows of w times M rows of x; every product has one accumulator, walked from the first column to the last.
// kFetch asks for the next R rows of w meanwhile: the hardware's own prefetching stops at each page's end.
template <int R, int M, bool kFetch>
inline void dots(const float* x, int64_t x_stride, const float* w, int64_t w_stride, int64_t columns, float* y,
                 int64_t y_stride) {
  Vec acc[R][M] = {};
  int64_t c = 0;
  for (; c + kLanes <= columns; c += kLanes) {
    Vec row[R];
    for (int r = 0; r < R; ++r) {
      row[r] = load(w + r * w_stride + c);
      if (kFetch && c % 16 == 0) __builtin_prefetch(w + (r + R) * w_stride + c);
    }
    for (int m = 0; m < M; ++m) {
      const Vec v = load(x + m * x_stride + c);
      for (int r = 0; r < R; ++r) acc[r][m] = multiply_add(row[r], v, acc[r][m]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int m = 0; m < M; ++m) {
      float total = sum_lanes(acc[r][m]);
      for (int64_t t = c; t < columns; ++t) total += w[r * w_stride + t] * x[m * x_stride + t];
      y[m * y_stride + r] = total;
    }
}

// R rows of w times `count` rows of x.
template <int R>
inline void dots_rows(const float* x, int64_t x_stride, int64_t count, const float* w, int64_t w_stride,
                      int64_t columns, float* y, int64_t y_stride) {
  int64_t m = 0;
  if (count >= 4) {
    dots<R, 4, true>(x, x_stride, w, w_stride, columns, y, y_stride);
    for (m = 4; m + 4 <= count; m += 4)
      dots<R, 4, false>(x + m * x_stride, x_stride, w, w_stride, columns, y + m * y_stride, y_stride);
  }
  const float* rest = x + m * x_stride;
  float* out = y + m * y_stride;
  if (count - m == 3) dots<R, 3, true>(rest, x_stride, w, w_stride, columns, out, y_stride);
  if (count - m == 2) dots<R, 2, true>(rest, x_stride, w, w_stride, columns, out, y_stride);
  if (count - m == 1) dots<R, 1, true>(rest, x_stride, w, w_stride, columns, out, y_stride);
}

// y[m][r] = x[m] . w[r] for all rows of both.
inline void product(const float* x, int64_t x_stride, int64_t count, const float* w, int64_t w_stride, int64_t rows,
                    int64_t columns, float* y, int64_t y_stride) {
  int64_t r = 0;
  if (count == 1)
    for (; r + 6 <= rows; r += 6) dots<6, 1, true>(x, x_stride, w + r * w_stride, w_stride, columns, y + r, y_stride);
  for (; r + 3 <= rows; r += 3) dots_rows<3>(x, x_stride, count, w + r * w_stride, w_stride, columns, y + r, y_stride);
  for (; r < rows; ++r) dots_rows<1>(x, x_stride, count, w + r * w_stride, w_stride, columns, y + r, y_stride);
}

// e^x for x <= 0, about one unit in the last place; below -87 the smallest normal number.
inline Vec exp_lanes(Vec x) {
  const Vec lowest = Vec{} - 87.0f;
  x = x < lowest ? lowest : x;
  const Vec magic = Vec{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Vec shifted = x * 1.44269504088896341f + magic;
  const Vec n = shifted - magic;
  const Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = Vec{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  IntVec bits, exponent;
  std::memcpy(&exponent, &shifted, sizeof exponent);
  std::memcpy(&bits, &p, sizeof bits);
  bits += exponent << 23;
  std::memcpy(&p, &bits, sizeof p);
  return p;
}

// acc[m] = acc[m] * scale[m] + sum over keys of p[m][key] * v[key], for M rows.
template <int M>
inline void add_values(float* acc, int64_t dim, const float* scale, const float* p, int64_t p_stride, const float* v,
                       int64_t keys) {
  for (int64_t c = 0; c < dim; c += kLanes) {
    Vec total[M];
    for (int m = 0; m < M; ++m) total[m] = load(acc + m * dim + c) * scale[m];
    for (int64_t k = 0; k < keys; ++k) {
      const Vec value = load(v + k * dim + c);
      for (int m = 0; m < M; ++m) total[m] = multiply_add(value, Vec{} + p[m * p_stride + k], total[m]);
    }
    for (int m = 0; m < M; ++m) store(acc + m * dim + c, total[m]);
  }
}

}  // namespace

extern "C" {

// y (count, rows) = x (count, columns) times the transpose of w (rows, columns), all dense.
void kvferry_linear(const float* x, const float* w, float* y, int64_t count, int64_t rows, int64_t columns) {
  int64_t tile = 32768 / columns / 4 * 4;  // rows of x that stay in the second-level cache
  if (tile < 4) tile = 4;
  for (int64_t m = 0; m < count; m += tile) {
    const int64_t here = count - m < tile ? count - m : tile;
    product(x + m * columns, columns, here, w, columns, rows, columns, y + m * rows, rows);
  }
}

// Causal attention of sequences of a step over one layer's pages.
//
// q, out        (rows, heads, dim), q with q_stride floats a row, out dense; a sequence's rows are adjacent
// pool          the layer's first page: [k/v][kv_head][block][dim], page_stride floats from page to page
// first_row     of each sequence; row_end: one after its last; start: position of its first row
// tables        page numbers of all sequences one after the other; table_at: where each sequence's begin
void kvferry_attention(const float* q, int64_t q_stride, float* out, const float* pool, int64_t page_stride,
                       int64_t heads, int64_t kv_heads, int64_t block, int64_t dim, int64_t sequences,
                       const int64_t* first_row, const int64_t* row_end, const int64_t* start, const int64_t* tables,
                       const int64_t* table_at) {
  const int64_t group = heads / kv_heads;
  const int64_t tile = group >= 48 ? 1 : 48 / group;  // tokens at a time
  const int64_t padded = (block + kLanes - 1) / kLanes * kLanes;
  const float factor = 1.0f / std::sqrt(static_cast<float>(dim));
  std::vector<float> query(tile * group * dim), acc(tile * group * dim), scores(tile * group * padded);
  std::vector<float> peak(tile * group), total(tile * group), scale(tile * group);
  for (int64_t s = 0; s < sequences; ++s) {
    for (int64_t t0 = first_row[s]; t0 < row_end[s]; t0 += tile) {
      const int64_t tokens = row_end[s] - t0 < tile ? row_end[s] - t0 : tile;
      const int64_t rows = tokens * group;
      const int64_t position = start[s] + t0 - first_row[s];  // of the tile's first token
      const int64_t end = position + tokens;
      for (int64_t h = 0; h < kv_heads; ++h) {
        for (int64_t i = 0; i < rows; ++i) {
          const float* from = q + (t0 + i / group) * q_stride + (h * group + i % group) * dim;
          for (int64_t c = 0; c < dim; ++c) query[i * dim + c] = from[c] * factor;
          peak[i] = -INFINITY;
          total[i] = 0.0f;
        }
        std::memset(acc.data(), 0, rows * dim * sizeof(float));
        for (int64_t b = 0; b * block < end; ++b) {
          const int64_t keys = end - b * block < block ? end - b * block : block;
          const float* k = pool + tables[table_at[s] + b] * page_stride + h * block * dim;
          const float* v = k + kv_heads * block * dim;
          product(query.data(), dim, rows, k, dim, keys, dim, scores.data(), padded);
          for (int64_t i = 0; i < rows; ++i) {
            float* row = scores.data() + i * padded;
            int64_t valid = position + i / group + 1 - b * block;  // keys of this page that the token may see
            if (valid > keys) valid = keys;
            if (valid <= 0) {
              std::memset(row, 0, padded * sizeof(float));
              scale[i] = 1.0f;
              continue;
            }
            float highest = peak[i];
            for (int64_t j = 0; j < valid; ++j) highest = row[j] > highest ? row[j] : highest;
            for (int64_t j = valid; j < padded; ++j) row[j] = -INFINITY;
            Vec sum = {};
            for (int64_t j = 0; j < padded; j += kLanes) {
              Vec p = exp_lanes(load(row + j) - highest);
              if (j + kLanes > valid)
                for (int64_t lane = valid > j ? valid - j : 0; lane < kLanes; ++lane) p[lane] = 0.0f;
              store(row + j, p);
              sum += p;
            }
            scale[i] = exp_lanes(Vec{} + (peak[i] - highest))[0];
            total[i] = total[i] * scale[i] + sum_lanes(sum);
            peak[i] = highest;
          }
          int64_t i = 0;
          for (; i + 6 <= rows; i += 6)
            add_values<6>(acc.data() + i * dim, dim, scale.data() + i, scores.data() + i * padded, padded, v, keys);
          for (; i + 3 <= rows; i += 3)
            add_values<3>(acc.data() + i * dim, dim, scale.data() + i, scores.data() + i * padded, padded, v, keys);
          for (; i < rows; ++i)
            add_values<1>(acc.data() + i * dim, dim, scale.data() + i, scores.data() + i * padded, padded, v, keys);
        }
        for (int64_t i = 0; i < rows; ++i) {
          float* to = out + ((t0 + i / group) * heads + h * group + i % group) * dim;
          const float inverse = 1.0f / total[i];
          for (int64_t c = 0; c < dim; ++c) to[c] = acc[i * dim + c] * inverse;
        }
      }
    }
  }
}

}  // extern "C"
