// The operations of MaxSimGradientKernels for any vector type V.
// The unnamed namespace gives each unit its own copy, compiled with its own flags.
//
// V has: Reg, kLanes, kRows x kWide registers of sums for `combine`, kLong of them for `gather`; zero(), set(c),
// load(p), store(p, v), add(a, b), fma(a, b, c) = a b + c, widen(dtype, from, k) for kLanes elements.
#pragma once

#include <cstdint>

#include "max_sim_gradient_kernels.hpp"
#include "similarity.hpp"

namespace peaksim {
namespace {

inline float element(DType dtype, const void* from, int64_t k) {
    if (dtype == DType::float32) return static_cast<const float*>(from)[k];
    const uint16_t bits = static_cast<const uint16_t*>(from)[k];
    return dtype == DType::float16 ? from_float16(bits) : from_bfloat16(bits);
}

// float32, in panels: to[(k / columns * n + r) * columns + k % columns] = rows[r][k].
template <class V>
void pack(DType dtype, const void* const* rows, int64_t n, int64_t dim, float* to) {
    constexpr int64_t kColumns = V::kWide * V::kLanes;
    for (int64_t r = 0; r < n; ++r) {
        int64_t k = 0;
        float* at = to + r * kColumns;
        for (; k + kColumns <= dim; k += kColumns, at += n * kColumns) {
            for (int w = 0; w < V::kWide; ++w) {
                V::store(at + w * V::kLanes, V::widen(dtype, rows[r], k + w * V::kLanes));
            }
        }
        if (k == dim) continue;
        for (int64_t x = 0; x < kColumns; ++x) at[x] = k + x < dim ? element(dtype, rows[r], k + x) : 0.0f;
    }
}

// Rows that are combined before the sums go back to memory: their coefficients lie side by side on the stack.
constexpr int64_t kDeep = 128;

// M results, one panel; c[r * M + m]. Of the last panel only `left` columns are written.
template <class V, int M>
void combine_panel(const float* panel, int64_t n, const float* c, float* const* to, int64_t k, int64_t left) {
    using Reg = typename V::Reg;
    constexpr int W = V::kWide;
    Reg sums[M][W];
    for (int m = 0; m < M; ++m) {
        for (int w = 0; w < W; ++w) sums[m][w] = V::zero();
    }
    for (int64_t r = 0; r < n; ++r, panel += W * V::kLanes, c += M) {
        Reg x[W];
        for (int w = 0; w < W; ++w) x[w] = V::load(panel + w * V::kLanes);
        for (int m = 0; m < M; ++m) {
            const Reg factor = V::set(c[m]);
            for (int w = 0; w < W; ++w) sums[m][w] = V::fma(factor, x[w], sums[m][w]);
        }
    }
    for (int m = 0; m < M; ++m) {
        float* result = to[m] + k;
        if (left >= W * V::kLanes) {
            for (int w = 0; w < W; ++w) {
                float* at = result + w * V::kLanes;
                V::store(at, V::add(V::load(at), sums[m][w]));
            }
            continue;
        }
        float rest[W * V::kLanes];
        for (int w = 0; w < W; ++w) V::store(rest + w * V::kLanes, sums[m][w]);
        for (int64_t x = 0; x < left; ++x) result[x] += rest[x];
    }
}

template <class V, int M>
void combine_rows(const float* packed, int64_t n, int64_t dim, const float* c, int64_t c_row, int64_t c_step,
                  int64_t count, float* const* to) {
    constexpr int64_t kColumns = V::kWide * V::kLanes;
    float beside[kDeep * M];
    for (; count >= M; count -= M, c += M * c_row, to += M) {
        for (int64_t first = 0; first < n; first += kDeep) {
            const int64_t rows = n - first < kDeep ? n - first : kDeep;
            for (int64_t r = 0; r < rows; ++r) {
                for (int m = 0; m < M; ++m) beside[r * M + m] = c[m * c_row + (first + r) * c_step];
            }
            const float* panel = packed + first * kColumns;
            for (int64_t k = 0; k < dim; k += kColumns, panel += n * kColumns) {
                combine_panel<V, M>(panel, rows, beside, to, k, dim - k);
            }
        }
    }
    if constexpr (M > 1) {
        if (count > 0) combine_rows<V, (M + 2) / 3>(packed, n, dim, c, c_row, c_step, count, to);
    }
}

template <class V>
void combine(const float* packed, int64_t n, int64_t dim, const float* c, int64_t c_row, int64_t c_step, int64_t count,
             float* const* to) {
    combine_rows<V, V::kRows>(packed, n, dim, c, c_row, c_step, count, to);
}

// W vectors of the result, from column k on, for as many times as there are columns; the next column.
template <class V, DType kType, int W>
int64_t gather_columns(const void* const* rows, const float* c, int64_t n, int64_t dim, int64_t k, float* to) {
    using Reg = typename V::Reg;
    for (; k + W * V::kLanes <= dim; k += W * V::kLanes) {
        Reg sums[W];
        for (int w = 0; w < W; ++w) sums[w] = V::load(to + k + w * V::kLanes);
        for (int64_t r = 0; r < n; ++r) {
            const Reg factor = V::set(c[r]);
            for (int w = 0; w < W; ++w) sums[w] = V::fma(factor, V::widen(kType, rows[r], k + w * V::kLanes), sums[w]);
        }
        for (int w = 0; w < W; ++w) V::store(to + k + w * V::kLanes, sums[w]);
    }
    return k;
}

template <class V, DType kType>
void gather_of(const void* const* rows, const float* c, int64_t n, int64_t dim, float* to) {
    int64_t k = gather_columns<V, kType, V::kLong>(rows, c, n, dim, 0, to);
    k = gather_columns<V, kType, V::kLong / 4>(rows, c, n, dim, k, to);
    k = gather_columns<V, kType, 1>(rows, c, n, dim, k, to);
    for (; k < dim; ++k) {
        float sum = to[k];
        for (int64_t r = 0; r < n; ++r) sum += c[r] * element(kType, rows[r], k);
        to[k] = sum;
    }
}

template <class V>
void gather(DType dtype, const void* const* rows, const float* c, int64_t n, int64_t dim, float* to) {
    switch (dtype) {
        case DType::float32: return gather_of<V, DType::float32>(rows, c, n, dim, to);
        case DType::float16: return gather_of<V, DType::float16>(rows, c, n, dim, to);
        case DType::bfloat16: return gather_of<V, DType::bfloat16>(rows, c, n, dim, to);
    }
}

// The softmax's denominator is at least 1 where the maximum is finite. Elsewhere the exponentials of the differences
// say all: 0 below an infinite maximum, NaN at it.
inline float spread_of(float c, float most, float total) {
    const float zero = most - most;  // NaN if most is infinite or NaN
    return zero == 0.0f ? c / total : c;
}

void softmax_columns(float* s, int64_t n, int64_t stride, int64_t width, float temperature, const float* c,
                     float* __restrict most, float* __restrict total) {
    const float inverse = 1.0f / temperature;
    for (int64_t x = 0; x < width; ++x) {
        most[x] = s[x];
        total[x] = 0.0f;
    }
    for (int64_t r = 1; r < n; ++r) {
        const float* row = s + r * stride;
        for (int64_t x = 0; x < width; ++x) most[x] = beats(row[x], most[x]) ? row[x] : most[x];
    }
    for (int64_t r = 0; r < n; ++r) {
        float* __restrict row = s + r * stride;
        for (int64_t x = 0; x < width; ++x) {
            row[x] = exp_of((row[x] - most[x]) * inverse);
            total[x] += row[x];
        }
    }
    for (int64_t x = 0; x < width; ++x) total[x] = spread_of(c[x], most[x], total[x]);
    for (int64_t r = 0; r < n; ++r) {
        float* __restrict row = s + r * stride;
        for (int64_t x = 0; x < width; ++x) row[x] *= total[x];
    }
}

constexpr int kSide = 16;  // maxima and sums side by side, for the compiler to put on vectors

float greatest(const float* s, int64_t n) {
    float lane[kSide];
    for (int i = 0; i < kSide; ++i) lane[i] = s[0];
    int64_t x = 0;
    for (; x + kSide <= n; x += kSide) {
        for (int i = 0; i < kSide; ++i) lane[i] = beats(s[x + i], lane[i]) ? s[x + i] : lane[i];
    }
    for (int i = 0; x + i < n; ++i) lane[i] = beats(s[x + i], lane[i]) ? s[x + i] : lane[i];
    for (int i = 1; i < kSide; ++i) lane[0] = beats(lane[i], lane[0]) ? lane[i] : lane[0];
    return lane[0];
}

float sum_of(const float* e, int64_t n) {
    float lane[kSide] = {};
    int64_t x = 0;
    for (; x + kSide <= n; x += kSide) {
        for (int i = 0; i < kSide; ++i) lane[i] += e[x + i];
    }
    for (int i = 0; x + i < n; ++i) lane[i] += e[x + i];
    for (int i = 1; i < kSide; ++i) lane[0] += lane[i];
    return lane[0];
}

void softmax_row(const float* s, int64_t n, float temperature, float c, float* to) {
    const float inverse = 1.0f / temperature, most = greatest(s, n);
    for (int64_t x = 0; x < n; ++x) to[x] = exp_of((s[x] - most) * inverse);
    const float factor = spread_of(c, most, sum_of(to, n));
    for (int64_t x = 0; x < n; ++x) to[x] *= factor;
}

template <class V>
constexpr MaxSimGradientKernels gradient_table(const char* isa) {
    return {isa, V::kWide * V::kLanes, pack<V>, combine<V>, gather<V>, softmax_columns, softmax_row};
}

}  // namespace
}  // namespace peaksim
